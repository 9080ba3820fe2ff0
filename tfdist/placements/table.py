"""The one table of operations: what each makes of placements, and of which kind it is, for whoever else must know.

An operation that is not in it makes `Unknown` of anything but what is the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence

from tfdist.placements.call import Call, Rule
from tfdist.placements.kinds import How, Partial, Placement, Replicate, Unknown, Why
from tfdist.placements.rules import batches, drawing, gathers, joins, pointwise, products, reductions, slices, views


class Kind(enum.Enum):
    """What an operation does with its inputs."""

    POINTWISE = "an element depends on the same element of each input, or on scalars"
    PRODUCT = "a product of tensors, or a convolution"
    REDUCTION = "numbers along axes become one"
    SCAN = "numbers along an axis become running ones"
    VIEW = "the same numbers in another shape or order, or some of them, or repeated"
    SIZE = "a shape, or a number computed of one"
    GATHER = "parts that are looked up by their numbers"
    SCATTER = "parts that are put, or added, where numbers say"
    JOIN = "several tensors become one, or a list"
    ROWWISE = "each row is taken by itself"
    MEETING = "all of an input, or of an axis of it, is compared"
    RANDOM = "numbers are drawn"
    SAMPLER = "classes are drawn"
    WRITE = "a variable is written, or something is said: nothing comes back"


class Linear(enum.Enum):
    """In which inputs an operation is linear, nothing else being added."""

    TOGETHER = "in all"
    ONE = "in any one"
    FIRST = "in the first"
    SECOND = "in the second"
    BUT_LAST = "in all but the last, together"

    def holds(self, found: Sequence[bool]) -> bool:
        """Whether an operation is linear in those of its inputs for which `found` is true, and in no others."""
        if self is Linear.TOGETHER:
            return all(found)
        if self is Linear.ONE:
            return sum(found) == 1
        if self is Linear.BUT_LAST:
            return all(found[:-1]) and not found[-1]
        place = 0 if self is Linear.FIRST else 1
        return found[place] and sum(found) == 1


@dataclasses.dataclass(frozen=True)
class Row:
    """What is known of a type of operation.

    Attributes:
        rule: what it makes of placements.
        kind: of which kind it is.
        linear: in which inputs it is linear; None: in none, or it is not known.
        ignores: inputs that make nothing unknown, since it does not look at their numbers, or its rule knows better.
    """

    rule: Rule
    kind: Kind
    linear: Linear | None = None
    ignores: frozenset[int] = frozenset()


RULES: dict[str, Row] = {}
_OF_SHAPES = ("OnesLike", "Shape", "ShapeN", "Size", "ZerosLike")  # which of a number all ranks make the same


def _add(kind: Kind, rule: Rule, types: str, linear: Linear | None = None, ignores: Sequence[int] = ()) -> None:
    for name in types.split():
        RULES[name] = Row(rule, kind, linear, frozenset(ignores))


_add(
    Kind.POINTWISE,
    pointwise.pointwise,
    """
    Abs Acos Acosh Angle ApproximateEqual Asin Asinh AsString Atan Atan2 Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0
    BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Betainc BitwiseAnd BitwiseOr BitwiseXor Bucketize Ceil
    ClipByValue Complex ComplexAbs Cos Cosh DecodeBase64 Dawsn Digamma Elu EncodeBase64 Erf Erfc Erfinv Exp Expint Expm1
    FakeQuantWithMinMaxArgs FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel Floor
    FloorMod FresnelCos FresnelSin GreaterEqual Igamma IgammaGradA Igammac Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift
    Less LessEqual Lgamma Log Log1p Mod Ndtri NextAfter NotEqual OnesLike Polygamma PopulationCount Pow QuantizeAndDequantizeV2
    QuantizeAndDequantizeV3 QuantizeAndDequantizeV4 RandomGammaGrad RegexFullMatch RegexReplace Reciprocal Relu Relu6 RightShift
    Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus Softsign Spence Sqrt Square SquaredDifference StaticRegexFullMatch
    StaticRegexReplace StringJoin StringLength StringLower StringStrip StringToHashBucket StringToHashBucketFast
    StringToHashBucketStrong StringToNumber StringUpper Substr Tan Tanh TruncateMod UnicodeScript UnicodeTranscode Xdivy Xlog1py
    Xlogy ZerosLike Zeta
    """,
)
_add(
    Kind.POINTWISE,
    functools.partial(pointwise.way_back, place=0),
    "EluGrad LeakyReluGrad Relu6Grad ReluGrad SeluGrad SoftplusGrad SoftsignGrad",
)
_add(
    Kind.POINTWISE,
    functools.partial(pointwise.way_back, place=1),
    "InvGrad ReciprocalGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad",
)
_add(Kind.POINTWISE, pointwise.alike, "OnesLike ZerosLike", ignores=())
_add(Kind.POINTWISE, pointwise.same, "Identity StopGradient", Linear.FIRST)
_add(
    Kind.POINTWISE,
    pointwise.same,
    "CheckNumerics EnsureShape PreventGradient Snapshot",
)
_add(Kind.POINTWISE, pointwise.cast, "Cast", Linear.FIRST)
_add(Kind.POINTWISE, pointwise.linear, "Bitcast Conj Imag Real")
_add(Kind.POINTWISE, pointwise.negative, "Neg", Linear.FIRST)
_add(Kind.POINTWISE, pointwise.negative, "LogicalNot")
_add(Kind.POINTWISE, pointwise.add, "Add AddN AddV2 Sub", Linear.TOGETHER)
_add(Kind.POINTWISE, pointwise.multiply, "Mul", Linear.ONE)
_add(Kind.POINTWISE, pointwise.multiply, "MulNoNan", Linear.FIRST)
_add(Kind.POINTWISE, pointwise.divide, "Div DivNoNan RealDiv", Linear.FIRST)
_add(Kind.POINTWISE, pointwise.divide_integers, "FloorDiv TruncateDiv")
_add(Kind.POINTWISE, pointwise.greatest, "LogicalOr Maximum")
_add(Kind.POINTWISE, pointwise.least, "LogicalAnd Minimum")
_add(Kind.POINTWISE, pointwise.compared, "Equal Greater NotEqual")
_add(Kind.POINTWISE, pointwise.select, "Select SelectV2")

_add(Kind.SIZE, pointwise.shape_of, "Shape ShapeN")
_add(Kind.SIZE, pointwise.size_of, "Size")
_add(Kind.SIZE, joins.list_length, "Rank", ignores=[0])
_add(Kind.SIZE, joins.list_length, "BroadcastGradientArgs", ignores=[0, 1])
_add(Kind.SIZE, joins.broadcast_shape, "BroadcastArgs")
_add(Kind.SIZE, joins.concat_offset, "ConcatOffset")
_add(Kind.SIZE, joins.stitch, "DynamicStitch ParallelDynamicStitch")
_add(Kind.SIZE, views.numbers_up_to, "Range")

_add(Kind.REDUCTION, reductions.reduction, "Mean Sum", Linear.FIRST)
_add(Kind.REDUCTION, reductions.reduction, "All Any EuclideanNorm Max Min Prod")
_add(Kind.REDUCTION, reductions.arg_reduction, "ArgMax ArgMin")
_add(Kind.REDUCTION, reductions.squares, "L2Loss")
_add(Kind.REDUCTION, reductions.bias_gradient, "BiasAddGrad")
_add(Kind.REDUCTION, reductions.counts, "Bincount DenseBincount", ignores=[1])
_add(Kind.REDUCTION, reductions.counts, "HistogramFixedWidth")
_add(Kind.SCAN, reductions.scan, "CumulativeLogsumexp Cumprod Cumsum")

_add(Kind.PRODUCT, products.einsum, "Einsum", Linear.ONE)
_add(Kind.PRODUCT, products.matmul, "BatchMatMulV2 MatMul", Linear.ONE)
_add(Kind.PRODUCT, products.matmul, "BatchMatMul BatchMatMulV3")
_add(Kind.PRODUCT, products.bias_add, "BiasAdd")
_add(Kind.PRODUCT, batches.batch, "Conv2D Conv3D DepthwiseConv2dNative Dilation2D")
_add(
    Kind.PRODUCT,
    functools.partial(batches.batch, rows=(2,)),
    "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput",
)
_add(
    Kind.PRODUCT,
    products.filter_gradient,
    "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter",
)

_add(Kind.VIEW, views.reshape, "Reshape", Linear.FIRST)
_add(Kind.VIEW, views.transpose, "Transpose", Linear.FIRST)
_add(Kind.VIEW, views.transpose, "ConjugateTranspose")
_add(Kind.VIEW, views.expand_dims, "ExpandDims", Linear.FIRST)
_add(Kind.VIEW, views.squeeze, "Squeeze", Linear.FIRST)
_add(Kind.VIEW, views.tile, "Tile", Linear.FIRST)
_add(Kind.VIEW, views.broadcast_to, "BroadcastTo", Linear.FIRST)
_add(Kind.VIEW, views.fill, "Fill")
_add(Kind.VIEW, views.pad, "Pad", Linear.FIRST)
_add(Kind.VIEW, views.pad, "MirrorPad PadV2")
_add(Kind.VIEW, functools.partial(views.along_axes, place=1), "ReverseV2", Linear.FIRST)
_add(Kind.VIEW, functools.partial(views.along_axes, place=2), "Roll")
_add(Kind.VIEW, views.reverse_sequence, "ReverseSequence")
_add(Kind.VIEW, slices.strided_slice, "StridedSlice", Linear.FIRST)
_add(Kind.VIEW, slices.plain_slice, "Slice", Linear.FIRST)
_add(Kind.VIEW, slices.split, "SplitV", Linear.FIRST)
_add(Kind.VIEW, slices.split, "Split", Linear.SECOND)
_add(Kind.VIEW, views.unpack, "Unpack", Linear.FIRST)
_add(Kind.VIEW, views.one_hot, "OneHot")
_add(Kind.VIEW, slices.slice_gradient, "StridedSliceGrad")

_add(Kind.GATHER, gathers.gather, "Gather GatherV2", Linear.FIRST)
_add(Kind.GATHER, gathers.gather, "ResourceGather")
_add(Kind.GATHER, gathers.gather_nd, "GatherNd ResourceGatherNd")
_add(Kind.GATHER, views.places_where, "Where")
_add(Kind.GATHER, gathers.partition, "DynamicPartition")
_add(Kind.GATHER, batches.looked_up, "LookupTableFind LookupTableFindV2")
_add(Kind.SCATTER, gathers.segments, "UnsortedSegmentSum", Linear.FIRST)
_add(
    Kind.SCATTER,
    gathers.segments,
    "SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd",
)
_add(
    Kind.SCATTER,
    gathers.scatter,
    "ScatterNd TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate",
)
_add(Kind.SCATTER, gathers.to_dense, "SparseToDense")
_add(Kind.SCATTER, gathers.sparse_product, "SparseTensorDenseMatMul")

_add(Kind.JOIN, joins.pack, "Pack", Linear.TOGETHER)
_add(Kind.JOIN, joins.concat, "ConcatV2", Linear.BUT_LAST)
_add(Kind.JOIN, joins.fresh_list, "EmptyTensorList TensorListReserve", ignores=[0])
_add(Kind.JOIN, joins.list_of_parts, "TensorListFromTensor", ignores=[1])
_add(Kind.JOIN, joins.list_with, "TensorListPushBack TensorListSetItem")
_add(Kind.JOIN, joins.list_item, "TensorListGetItem", ignores=[2])
_add(Kind.JOIN, joins.list_popped, "TensorListPopBack", ignores=[1])
_add(Kind.JOIN, joins.list_stacked, "TensorListStack", ignores=[1])
_add(Kind.JOIN, joins.list_gathered, "TensorListGather", ignores=[2])
_add(Kind.JOIN, joins.list_joined, "TensorListConcatV2", ignores=[1])
_add(Kind.JOIN, joins.list_length, "TensorListLength", ignores=[0])
_add(Kind.JOIN, joins.list_shape, "TensorListElementShape")
_add(Kind.JOIN, joins.list_item, "TensorListResize")
_add(Kind.JOIN, joins.optional, "OptionalFromValue OptionalGetValue OptionalNone")

_add(
    Kind.ROWWISE,
    batches.batch,
    """
    AdjustContrastv2 AdjustHue AdjustSaturation AvgPool AvgPool3D DepthToSpace ExtractImagePatches ExtractVolumePatches
    LRN MaxPool MaxPool3D MaxPoolV2 ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor
    ScaleAndTranslate SpaceToDepth
    """,
)
_add(Kind.ROWWISE, functools.partial(batches.batch, rows=(1,)), "AvgPool3DGrad AvgPoolGrad")
_add(Kind.ROWWISE, batches.batch, "ResizeNearestNeighborGrad")
_add(Kind.ROWWISE, functools.partial(batches.batch, rows=(0, 1)), "ResizeBicubicGrad ResizeBilinearGrad ScaleAndTranslateGrad")
_add(
    Kind.ROWWISE,
    functools.partial(batches.batch, rows=(0, 1, 2)),
    "LRNGrad MaxPool3DGrad MaxPool3DGradGrad MaxPoolGrad MaxPoolGradGrad MaxPoolGradV2",
)
_add(Kind.ROWWISE, functools.partial(batches.batch, rows=(0, 1)), "InTopK InTopKV2 SparseSoftmaxCrossEntropyWithLogits")
_add(Kind.ROWWISE, batches.along_last, "LogSoftmax Softmax SoftmaxCrossEntropyWithLogits")
_add(
    Kind.ROWWISE,
    functools.partial(views.by_rows, inner=1),
    "NthElement TopKV2 FFT IFFT IRFFT RFFT MatrixDiag MatrixDiagV2 MatrixDiagV3",
)
_add(
    Kind.ROWWISE,
    functools.partial(views.by_rows, inner=2),
    """
    Cholesky Eig FFT2D IFFT2D IRFFT2D LogMatrixDeterminant Lu MatrixBandPart MatrixDeterminant MatrixDiagPart MatrixDiagPartV2
    MatrixDiagPartV3 MatrixInverse MatrixLogarithm MatrixSquareRoot Qr RFFT2D SelfAdjointEigV2 Svd
    """,
)
_add(Kind.ROWWISE, functools.partial(views.by_rows, inner=3), "FFT3D IFFT3D IRFFT3D RFFT3D RGBToHSV HSVToRGB")
_add(
    Kind.ROWWISE,
    functools.partial(batches.matrices, inner=2, inputs=2),
    "CholeskyGrad MatrixSolve MatrixSolveLs MatrixTriangularSolve",
)
_add(Kind.ROWWISE, batches.set_diagonal, "MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3")
_add(Kind.ROWWISE, batches.normalized, "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3")
_add(
    Kind.ROWWISE,
    batches.normalized_gradient,
    "FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3",
    ignores=[3, 4, 5],
)
_add(Kind.ROWWISE, batches.to_blocks, "SpaceToBatchND")
_add(Kind.ROWWISE, batches.from_blocks, "BatchToSpaceND")
_add(Kind.ROWWISE, batches.transformed, "ImageProjectiveTransformV2 ImageProjectiveTransformV3")
_add(Kind.ROWWISE, batches.cropped, "CropAndResize")
_add(Kind.ROWWISE, batches.found_places, "LowerBound UpperBound")
_add(Kind.ROWWISE, batches.words, "StringSplitV2")
_add(Kind.MEETING, batches.padded, "RaggedTensorToTensor", ignores=range(3, 16))  # where rows begin is each rank's own
_add(
    Kind.MEETING,
    batches.meeting,
    """
    BatchToSpace InvertPermutation LinSpace NonMaxSuppressionV5 SpaceToBatch Unique UniqueV2 UniqueWithCounts
    UniqueWithCountsV2
    """,
)

_add(
    Kind.RANDOM,
    drawing.drawn,
    """
    ParameterizedTruncatedNormal RandomGamma RandomPoissonV2 RandomStandardNormal RandomUniform RandomUniformInt
    StatelessParameterizedTruncatedNormal StatelessRandomBinomial StatelessRandomGammaV2 StatelessRandomGammaV3
    StatelessRandomNormal StatelessRandomNormalV2 StatelessRandomPoisson StatelessRandomUniform StatelessRandomUniformFullInt
    StatelessRandomUniformFullIntV2 StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessRandomUniformV2
    StatelessTruncatedNormal StatelessTruncatedNormalV2 TruncatedNormal
    """,
)
_add(
    Kind.RANDOM,
    functools.partial(drawing.drawn, shape=2),
    "StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt StatefulUniformInt",
)
_add(
    Kind.RANDOM,
    drawing.key,
    "RngReadAndSkip StatelessRandomGetAlg StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg",
)
_add(Kind.RANDOM, drawing.classes, "Multinomial StatelessMultinomial")
_add(Kind.RANDOM, drawing.shuffled, "RandomShuffle StatelessShuffle")
_add(
    Kind.SAMPLER,
    drawing.candidates,
    """
    FixedUnigramCandidateSampler LearnedUnigramCandidateSampler LogUniformCandidateSampler ThreadUnsafeUnigramCandidateSampler
    UniformCandidateSampler
    """,
)
_add(
    Kind.WRITE,
    batches.meeting,
    """
    Assert AssignAddVariableOp AssignSubVariableOp AssignVariableOp NoOp ResourceApplyGradientDescent ResourceScatterAdd
    ResourceScatterMax ResourceScatterMin ResourceScatterMul ResourceScatterSub
    ResourceScatterUpdate
    """,
)


def row_of(kind: str) -> Row | None:
    """Returns what is known of the operations of a type; None: nothing."""
    return RULES.get(kind)


def is_elementwise(kind: str) -> bool:
    """Whether each element of what such an operation returns depends on the same element of its inputs, and on scalars."""
    row = RULES.get(kind)
    return row is not None and row.kind is Kind.POINTWISE


def linear_inputs(kind: str) -> Linear | None:
    """Returns in which of its inputs such an operation is linear, nothing else being added; None: in none, or it is not
    known."""
    row = RULES.get(kind)
    return None if row is None else row.linear


def moved_inputs(kind: str, number: int) -> range:
    """Returns the places of those among `number` inputs that such an operation only moves, casts or joins; none: it computes."""
    row = RULES.get(kind)
    moves = row is not None and (row.kind in (Kind.VIEW, Kind.JOIN) or row.rule in (pointwise.same, pointwise.cast))
    if row is None or not moves or row.linear is None:
        return range(0)
    of_one = range(1, 2) if row.linear is Linear.SECOND else range(1)
    return {Linear.TOGETHER: range(number), Linear.BUT_LAST: range(number - 1)}.get(row.linear, of_one)


def placements_of(call: Call) -> list[Placement]:
    """Returns the placement of each output of `call`, whose inputs may be `Unknown` here."""
    row, found = RULES.get(call.type), list(call.inputs)
    number = len(call.results)
    looked_at = [place for place in range(len(found)) if row is None or place not in row.ignores]
    for place in looked_at:
        is_scalar = call.type in _OF_SHAPES and call.shapes[place].rank == 0
        if isinstance(found[place], Unknown) and not is_scalar:
            return [found[place]] * number
        if isinstance(found[place], Unknown):
            found[place] = Replicate()
    is_random = row is not None and row.kind in (Kind.RANDOM, Kind.SAMPLER)
    seen = [found[place] for place in looked_at]
    if all(isinstance(x, Replicate) for x in seen) and (row is not None or call.is_pure) and not is_random:
        return [Replicate(any(x.is_drawn for x in seen if isinstance(x, Replicate)))] * number
    if row is None:
        return [call.unknown(Why.NO_RULE)] * number
    if Partial(How.ALIKE) in seen:  # what a rank without rows has counts nowhere
        found = [Replicate() if x == Partial(How.ALIKE) else x for x in found]
        results = placements_of(dataclasses.replace(call, inputs=tuple(found)))
        return [Partial(How.ALIKE) if isinstance(x, Replicate) else x for x in results]
    result = row.rule(dataclasses.replace(call, inputs=tuple(found)))
    return result if isinstance(result, list) else [result] * number
