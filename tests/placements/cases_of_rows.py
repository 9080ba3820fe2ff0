"""Cases of operations that take rows one by one, multiply and reduce them, or draw numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.placements.cases import NUMBERS, names, of, rows
from tests.placements.worlds import RANKS, Case, Given, World
from tfdist.placements.kinds import How

ONES = [1, 1, 1, 1]
ONES_3D = [1, 1, 1, 1, 1]


@of("Sum Mean Max Min Prod Any All EuclideanNorm")
def reductions(world: World, name: str):
    dtype = "bool" if name in ("Any", "All") else "float32"
    how = world.one(How.MAX, How.MIN) if dtype == "bool" else world.one(*NUMBERS)
    size = world.width()
    given = world.one(
        rows(world, size, dtype=dtype),
        rows(world, size, 2, dtype=dtype),
        rows(world, size, rows=("a", "b"), dtype=dtype),
        world.partial(how, (size, 2), dtype),
        world.uneven(size, dtype=dtype),
    )
    axes = world.one(0, 1, -1, [0, 1], [1], [0])
    if name == "Prod" and world.one(0, 1):
        return {"input": world.lengths(2, 3, axis=world.one(0, 1)), "axis": [0]}
    return {"input": given, "axis": axes, "keep_dims": world.one(True, False)}


@of("ArgMax ArgMin")
def places(world: World, name: str):
    return {"input": rows(world, world.width(), rows=names(world)), "dimension": world.one(0, 1, -1)}


@of("Cumsum Cumprod CumulativeLogsumexp")
def scans(world: World, name: str):
    numbers = world.partial(world.one(*NUMBERS), (3,))
    return {"x": world.one(rows(world, world.width(), rows=names(world)), numbers), "axis": world.one(0, 1, -1)}


@of("L2Loss BiasAddGrad")
def to_numbers(world: World, name: str):
    given = rows(world, 2, world.width(), rows=names(world))
    return {"t": given} if name == "L2Loss" else {"out_backprop": given, "data_format": "NHWC"}


@of("Bincount DenseBincount HistogramFixedWidth")
def counts(world: World, name: str):
    if name == "HistogramFixedWidth":
        return {"values": rows(world), "value_range": world.same(np.asarray([0, 1], "float32")), "nbins": 4}
    sizes = world.one((), (world.width(),)) if name == "DenseBincount" else world.one((), (3,))
    given = rows(world, *sizes, dtype="int32", axis=0, rows=names(world)) if sizes else world.shard(dtype="int32")
    weights = rows(world, *sizes, axis=0) if world.one(0, 1) and len(given.placement.rows) == 1 else np.zeros(0, "float32")
    if not sizes and isinstance(weights, Given):
        weights = world.shard()
    place = "arr" if name == "Bincount" else "input"
    return {
        place: given,
        "size": 4,
        "weights": weights,
        **({"binary_output": world.one(True, False)} if place == "input" else {}),
    }


@of("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3")
def products(world: World, name: str):
    turned = {"transpose_a": world.one(True, False), "transpose_b": world.one(True, False)}
    one, other = "a", "b"
    if name != "MatMul":
        one, other, turned = "x", "y", {"adj_x": world.one(True, False), "adj_y": world.one(True, False)}
    first, second = tuple(turned)
    kind = world.one("rows and same", "rows and rows", "numbers", "same and rows")
    n, m = world.width(), world.width()
    outer = 1 if name != "MatMul" and world.one(0, 1) else 0
    left, right = (m, n) if turned[first] else (n, m), (n, 2) if turned[second] else (2, n)
    if kind == "numbers":
        given = world.partial(world.one(*NUMBERS), (2, n, m)[1 - outer :]), world.same(((m, 2), (2, m))[turned[second]])
    elif outer:
        batch = world.one(2, n)
        x = rows(world, *left, axis=0) if world.one(0, 1, 1) else rows(world, batch, m, axis=world.one(0, 1, 2))
        y = world.one(
            world.same((2, m) if turned[second] else (m, 2)), rows(world, *((2, m) if turned[second] else (m, 2)), axis=0)
        )
        given = world.one((x, y), (x, rows(world, batch, 2)), (x, x))
    elif kind == "rows and same":
        x = world.shard(m, axis=world.one(0, 1), rows=names(world))
        given = x, world.same(world.one((m, 2), (2, m), (m, m)))
    elif kind == "same and rows":
        given = world.same(world.one((2, m), (m, 2))), world.shard(m, axis=world.one(0, 1))
    else:
        both = names(world)
        given = world.shard(m, axis=world.one(0, 1), rows=both), world.shard(n, axis=world.one(0, 1), rows=both)
    del right
    more = {"Tout": "float32"} if name.endswith("V3") else {}
    return {one: given[0], other: given[1], **turned, **more}


EQUATIONS = (
    "ab,bc->ac", "ba,bc->ac", "ab,ab->a", "ab,ab->", "ab,ab->ab", "abc,cd->abd", "abc,abd->acd", "abc,adc->abd", "ab,cb->ac",
    "abc->acb", "ab->b", "...a,ab->...b", "a...,a...->...", "aab->ab", "ab,ba->ab", "abc,ade->bd",
)  # fmt: skip


@of("Einsum")
def einsum(world: World, name: str):
    equation, inputs = world.one(*EQUATIONS), []
    sizes = {letter: world.width() for letter in "abcde"}
    letter, both = world.one(*"abc"), names(world)
    for part in equation.partition("->")[0].split(","):
        plain = part.replace("...", "c")
        shape = [sizes[x] for x in plain]
        at = plain.find(letter)
        is_number = world.one(0, 0, 0, 1)
        if at >= 0 and plain.count(letter) == 1 and not is_number:
            inputs.append(world.shard(*shape[:at], *shape[at + 1 :], axis=at, rows=both))
        else:
            inputs.append(world.partial(world.one(*NUMBERS), shape) if is_number else world.same(shape))
    return {"inputs": inputs, "equation": equation}


@of("BiasAdd")
def bias(world: World, name: str):
    n = world.width()
    data_format = world.one("NHWC", "NCHW")
    given = world.one(rows(world, 2, n), rows(world, 2, n, rows=("a", "b")), world.partial(world.one(*NUMBERS), (2, n)))
    other = world.one(world.same((n,)), world.same((2,)), world.partial(world.one(*NUMBERS), (n,)), world.shard())
    return {"value": given, "bias": other, "data_format": data_format}


@of("Conv2D DepthwiseConv2dNative Dilation2D Conv3D")
def convolutions(world: World, name: str):
    # Of no rows TensorFlow's kernels return a wrong number of channels, on some CPUs: `tfdist.keras_layers.empty_batches`.
    world.rows = world.one(*[rows for rows in RANKS if 0 not in rows])
    space = (4, 4, 4)[: 3 if name == "Conv3D" else 2]
    axis = world.one(0, 0, 0, 1)
    given = world.shard(*space, 3, rows=names(world)) if axis == 0 else world.shard(2, *space[1:], 3, axis=1)
    kernel = world.same((2,) * len(space) + ((3,) if name == "Dilation2D" else (3, 2)))
    more: dict[str, Any] = {"padding": "SAME", "strides": ONES if len(space) == 2 else ONES_3D}
    return {"input": given, "filter": kernel, **more, **({"rates": ONES} if name == "Dilation2D" else {})}


@of(
    "Conv2DBackpropInput Conv2DBackpropFilter DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter "
    "Conv3DBackpropInputV2 Conv3DBackpropFilterV2"
)
def convolution_gradients(world: World, name: str):
    space, is_deep, both = (4, 4, 4)[: 3 if "3D" in name else 2], name.startswith("Depth"), names(world)
    kernel = (2,) * len(space) + (3, 2)
    back = world.shard(*space, 6 if is_deep else 2, rows=both)
    more = {"padding": "SAME", "strides": ONES if len(space) == 2 else ONES_3D}
    if "Filter" in name:
        given = world.shard(*space, 3, rows=both)
        return {"input": given, "filter_sizes": list(kernel), "out_backprop": back, **more}
    return {"input_sizes": world.lengths(*space, 3, rows=both), "filter": world.same(kernel), "out_backprop": back, **more}


IMAGES: dict[str, dict[str, Any]] = {
    "AdjustContrastv2": {"contrast_factor": 0.5}, "AdjustHue": {"delta": 0.1}, "AdjustSaturation": {"scale": 0.5},
    "RGBToHSV": {}, "HSVToRGB": {},
    "ResizeArea": {"size": [3, 3]}, "ResizeBicubic": {"size": [3, 3]}, "ResizeBilinear": {"size": [3, 3]},
    "ResizeNearestNeighbor": {"size": [3, 3]},
    "ScaleAndTranslate": {"size": [3, 3], "scale": [1.0, 1.0], "translation": [0.0, 0.0]},
    "ExtractImagePatches": {"ksizes": [1, 2, 2, 1], "strides": ONES, "rates": ONES, "padding": "SAME"},
    "ExtractVolumePatches": {"ksizes": [1, 2, 2, 2, 1], "strides": ONES_3D, "padding": "SAME"},
    "AvgPool": {"ksize": [1, 2, 2, 1], "strides": ONES, "padding": "SAME"},
    "MaxPool": {"ksize": [1, 2, 2, 1], "strides": ONES, "padding": "SAME"},
    "MaxPoolV2": {"ksize": [1, 2, 2, 1], "strides": ONES, "padding": "SAME"},
    "AvgPool3D": {"ksize": [1, 2, 2, 2, 1], "strides": ONES_3D, "padding": "SAME"},
    "MaxPool3D": {"ksize": [1, 2, 2, 2, 1], "strides": ONES_3D, "padding": "SAME"},
    "LRN": {}, "SpaceToDepth": {"block_size": 2}, "DepthToSpace": {"block_size": 2},
    "SpaceToBatchND": {"block_shape": [2, 1], "paddings": [[0, 0], [0, 0]]},
    "BatchToSpaceND": {"block_shape": [2, 1], "crops": [[0, 0], [0, 0]]},
}  # fmt: skip
_PLACES = {"AvgPool": "value", "AdjustContrastv2": "images", "ScaleAndTranslate": "images", "ExtractImagePatches": "images"}


@of(" ".join(IMAGES))
def images(world: World, name: str):
    space = (4, 4, 4) if "3D" in name or "Volume" in name else (4, 4)
    channels = 4 if name == "DepthToSpace" else 3
    both = ("a", "a") if name == "BatchToSpaceND" else names(world)
    place = "images" if name.startswith(("Adjust", "Resize", "RGB", "HSV")) else _PLACES.get(name, "input")
    if world.one(0, 0, 0, 1):
        return {place: world.shard(2, *space[1:], channels, axis=1), **IMAGES[name]}
    return {place: world.shard(*space, channels, rows=both), **IMAGES[name]}


@of(
    "AvgPoolGrad AvgPool3DGrad MaxPoolGrad MaxPoolGradGrad MaxPoolGradV2 MaxPool3DGrad MaxPool3DGradGrad LRNGrad "
    "ResizeBicubicGrad ResizeBilinearGrad ResizeNearestNeighborGrad ScaleAndTranslateGrad"
)
def image_gradients(world: World, name: str):
    space, both = (4, 4, 4) if "3D" in name else (4, 4), names(world)
    ones = ONES_3D if "3D" in name else ONES
    one, two, three = (world.shard(*space, 3, rows=both) for _ in range(3))
    if name == "LRNGrad":
        return {"input_grads": one, "input_image": two, "output_image": three}
    if name.endswith("NeighborGrad"):
        return {"grads": one, "size": [4, 4]}
    if name.startswith(("Resize", "Scale")):
        more = {"scale": [1.0, 1.0], "translation": [0.0, 0.0]} if name.startswith("Scale") else {}
        return {"grads": one, "original_image": two, **more}
    more = {"ksize": ones, "strides": ones, "padding": "SAME"}
    if name.startswith("Avg"):
        return {"orig_input_shape": world.lengths(*space, 3, rows=both), "grad": one, **more}
    return {"orig_input": two, "orig_output": two, "grad": one, **more}


@of("InTopK InTopKV2 SparseSoftmaxCrossEntropyWithLogits Softmax LogSoftmax SoftmaxCrossEntropyWithLogits")
def classes(world: World, name: str):
    given, n = rows(world, 4, rows=names(world)), world.width()
    if name in ("Softmax", "LogSoftmax"):
        return {"logits": world.one(given, rows(world, n, 4))}
    both = names(world)
    one = rows(world, 4, rows=both, axis=world.one(0, 0, 1))
    if name == "SoftmaxCrossEntropyWithLogits":
        return {"features": one, "labels": world.one(rows(world, 4, rows=both, axis=one.placement.axis), world.same((1, 4)))}
    labels = world.shard(dtype="int32", rows=both)
    if name.startswith("Sparse"):
        return {"features": one, "labels": labels}
    return {"predictions": one, "targets": labels, "k": 2}


MATRICES = """
    Cholesky LogMatrixDeterminant Lu MatrixBandPart MatrixDeterminant MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3
    MatrixInverse MatrixLogarithm MatrixSquareRoot Qr SelfAdjointEigV2 Svd Eig
    """
VECTORS = "MatrixDiag MatrixDiagV2 MatrixDiagV3 NthElement TopKV2"
WAVES = "FFT IFFT IRFFT RFFT FFT2D IFFT2D IRFFT2D RFFT2D FFT3D IFFT3D IRFFT3D RFFT3D"


@of(MATRICES)
def matrices(world: World, name: str):
    def positive(shape):
        a = world.numbers(shape)
        return (a @ np.swapaxes(a, -1, -2) if a.shape[-1] == a.shape[-2] else a) + 3 * np.eye(*shape[-2:], dtype="float32")

    n = world.one(2, 3)
    given = world.one(*(world.shard(n, n, make=positive, rows=names(world)) for _ in range(3)), world.shard(n, n, axis=1))
    if name in ("MatrixLogarithm", "MatrixSquareRoot"):
        given = world.shard(n, n, make=lambda shape: positive(shape).astype("complex64"))
    band = {"num_lower": 1, "num_upper": 0} if name == "MatrixBandPart" else {}
    more: dict[str, Any] = {"k": 0, "padding_value": 0.0} if name.startswith("MatrixDiagPartV") else {}
    more |= {"Tout": "complex64"} if name == "Eig" else {"compute_uv": False} if name == "Svd" else {}
    return Case(name, {"input": given, **band, **more}, results=(0,) if name in ("Eig", "SelfAdjointEigV2", "Svd") else None)


@of(VECTORS)
def vectors(world: World, name: str):
    more: dict[str, Any] = {"n": 1} if name == "NthElement" else {"k": 1} if name == "TopKV2" else {}
    if "DiagV" in name:
        more = {"k": 0, "num_rows": -1, "num_cols": -1, "padding_value": 0.0}
    return {"diagonal" if "Diag" in name else "input": rows(world, 2, world.width(), rows=names(world)), **more}


@of(WAVES)
def waves(world: World, name: str):
    inner = 1 if name[-1] == "T" else int(name[-2])
    is_real = name.startswith("RFFT")
    given = rows(world, *(2, 4, 4, 4)[: inner + 1], dtype="float32" if is_real else "complex64", rows=names(world))
    return {"input": given, **({"fft_length": [4] * inner} if "RFFT" in name else {})}


@of(
    "CholeskyGrad MatrixSolve MatrixSolveLs MatrixTriangularSolve MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 LowerBound "
    "UpperBound"
)
def pairs(world: World, name: str):
    def regular(shape):
        return world.numbers(shape) + 3 * np.eye(*shape[-2:], dtype="float32")

    both = names(world)
    one, two = world.shard(2, 2, make=regular, rows=both), world.shard(2, 2, rows=both)
    if name.startswith("MatrixSetDiag"):
        return {"input": one, "diagonal": world.shard(2, rows=both), **({"k": 0} if name[-2] == "V" else {})}
    if name.endswith("Bound"):
        return {
            "sorted_inputs": world.shard(3, make=lambda s: np.sort(world.numbers(s), -1), rows=both),
            "values": world.shard(2, rows=both),
        }
    if name == "CholeskyGrad":
        return {"l": one, "grad": two}
    return {"matrix": one, "rhs": two, **({"l2_regularizer": np.float64(0.1)} if name == "MatrixSolveLs" else {})}


@of("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3")
def normalizations(world: World, name: str):
    x, two, both = world.shard(2, 2, 3), world.shard(2, 2, 3), [world.same((3,)) for _ in range(4)]
    if "Grad" in name:  # of what was normalized by given numbers, as it is when it is not trained
        more = {"reserve_space_3": world.same((3,))} if name.endswith("V3") else {}
        given = {"y_backprop": x, "x": two, "scale": both[0], "reserve_space_1": both[1], "reserve_space_2": both[2], **more}
        return Case(name, {**given, "is_training": False}, results=(0, 1, 2))
    given = dict(zip(("scale", "offset", "mean", "variance"), both, strict=True))
    return Case(name, {"x": x, **given, "is_training": False}, results=(0,))


@of("ImageProjectiveTransformV2 ImageProjectiveTransformV3 CropAndResize")
def moved_images(world: World, name: str):
    both = names(world)
    given = world.shard(3, 3, 2, rows=both)
    if name == "CropAndResize":
        boxes = world.shard(4, rows=both)
        return {"image": given, "boxes": boxes, "box_ind": world.places(rows=both), "crop_size": [2, 2]}
    transforms = world.one(world.shard(8, rows=both), world.same((1, 8)))
    fill = {"fill_value": 0.0} if name.endswith("3") else {}
    return {"images": given, "transforms": transforms, "output_shape": [2, 2], "interpolation": "BILINEAR", **fill}


@of(
    "ParameterizedTruncatedNormal RandomGamma RandomPoissonV2 RandomStandardNormal RandomUniform RandomUniformInt "
    "TruncatedNormal StatelessRandomNormal StatelessRandomUniform StatelessRandomUniformFullInt StatelessRandomUniformInt "
    "StatelessTruncatedNormal "
    "StatelessRandomNormalV2 StatelessRandomUniformV2 StatelessRandomUniformFullIntV2 StatelessRandomUniformIntV2 "
    "StatelessTruncatedNormalV2 StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomPoisson StatelessRandomBinomial "
    "StatelessParameterizedTruncatedNormal"
)
def drawn(world: World, name: str):
    shape = world.one(world.lengths(world.width(), 2, axis=world.one(0, 1, 2)), world.constant([2, 3]))
    more: dict[str, Any] = {}
    if name in ("RandomStandardNormal", "RandomUniform", "TruncatedNormal", "StatelessRandomPoisson"):
        more["dtype"] = "float32"
    if name.endswith(("V2", "V3")) and name.startswith("Stateless") and name != "StatelessRandomGammaV2":
        more |= {"key": np.zeros(1, "uint64"), "counter": np.zeros(2, "uint64"), "alg": 1}
    elif name.startswith("Stateless"):
        more["seed"] = [1, 2]
    if "FullInt" in name:
        more["dtype"] = "int32"
    elif "UniformInt" in name:
        more |= {"minval": 0, "maxval": 5}
    if "Truncated" in name and "Parameterized" in name:
        deviations = "stddevs" if name.startswith("Stateless") else "stdevs"
        more |= {"means": 0.0, deviations: 1.0, "minvals": -1.0, "maxvals": 1.0}
    if "Gamma" in name:
        more["alpha"] = (
            world.one(world.same(()), rows(world))
            if name == "RandomGamma" and shape.is_constant and not world.is_static
            else world.same(())
        )
    if "Poisson" in name:
        more["rate" if name.startswith("Random") else "lam"] = world.same(())
    if "Binomial" in name:
        more |= {"counts": 3.0, "probs": 0.5}
    return Case(name, {"shape": shape, **more}, only_sizes=True)


@of(
    "RandomShuffle StatelessShuffle Multinomial StatelessMultinomial StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg"
)
def drawn_of_rows(world: World, name: str):
    if "Key" in name:
        return Case(name, {"seed": [1, 2]}, only_sizes=True)
    if "Multinomial" in name:
        more: dict[str, Any] = {"seed": [1, 2]} if name.startswith("Stateless") else {}
        return Case(name, {"logits": rows(world, 3), "num_samples": 2, **more}, only_sizes=True)
    key = {"key": np.zeros(1, "uint64"), "counter": np.zeros(2, "uint64"), "alg": 1} if name.startswith("Stateless") else {}
    return Case(name, {"value": world.one(rows(world, world.width()), world.same((3,))), **key}, only_sizes=True)


@of(
    "LogUniformCandidateSampler UniformCandidateSampler LearnedUnigramCandidateSampler ThreadUnsafeUnigramCandidateSampler "
    "FixedUnigramCandidateSampler"
)
def candidates(world: World, name: str):
    given = {"true_classes": world.shard(1, dtype="int64", rows=names(world)), "num_true": 1, "num_sampled": 2, "range_max": 5}
    return Case(name, {**given, "unique": True, **({"unigrams": [1.0] * 5} if name.startswith("Fixed") else {})}, only_sizes=True)
