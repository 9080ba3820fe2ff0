"""The one table of operations: what each makes of placements, and of which kind it is, for whoever else must know.

An operation that is not in it makes `Unknown` of anything but what is the same on all ranks.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar

from tfdist.placements.call import Call, NotKnown, Rule
from tfdist.placements.kinds import How, Partial, Placement, Replicate, Unknown, Why
from tfdist.placements.rules import batches, drawing, gathers, joins, meeting, pointwise, products, reductions, slices, views

T = TypeVar("T")


class Kind(enum.Enum):
    """The kind of an operation."""

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
    """In which inputs an operation is linear, nothing else being added: the places of those that it is linear in together."""

    TOGETHER = slice(None)
    ONE = slice(0)  # any one of them
    FIRST = slice(1)
    SECOND = slice(1, 2)
    BUT_LAST = slice(-1)

    def holds(self, found: Sequence[bool]) -> bool:
        """Whether an operation is linear in those of its inputs for which `found` is true, and in no others."""
        places = [place for place, is_read in enumerate(found) if is_read]
        return len(places) == 1 if self is Linear.ONE else places == list(range(len(found))[self.value])


_RULES: dict[Kind, dict[Rule, str]] = {
    Kind.POINTWISE: {
        meeting.aligned: """
        Abs Acos Acosh Angle ApproximateEqual Asin Asinh AsString Atan Atan2 Atanh BesselI0 BesselI0e BesselI1 BesselI1e
        BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Betainc BitwiseAnd BitwiseOr BitwiseXor
        Bucketize Ceil ClipByValue Complex ComplexAbs Cos Cosh DecodeBase64 Dawsn Digamma Elu EncodeBase64 Erf Erfc Erfinv Exp
        Expint Expm1 FakeQuantWithMinMaxArgs FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVars
        FakeQuantWithMinMaxVarsPerChannel Floor FloorMod FresnelCos FresnelSin GreaterEqual Igamma IgammaGradA Igammac Inv
        Invert IsFinite IsInf IsNan LeakyRelu LeftShift Less LessEqual Lgamma Log Log1p Mod Ndtri NextAfter Polygamma
        PopulationCount Pow QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4 RandomGammaGrad
        RegexFullMatch RegexReplace Reciprocal Relu Relu6 RightShift Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus
        Softsign Spence Sqrt Square SquaredDifference StaticRegexFullMatch StaticRegexReplace StringJoin StringLength
        StringLower StringStrip StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper
        Substr Tan Tanh TruncateMod UnicodeScript UnicodeTranscode Xdivy Xlog1py Xlogy Zeta
        """,
        pointwise.linear: """
        Bitcast Conj EluGrad Imag LeakyReluGrad Real Relu6Grad ReluGrad SeluGrad SoftplusGrad SoftsignGrad
        """,
        partial(pointwise.linear, place=1): "InvGrad ReciprocalGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad",
        pointwise.alike: "OnesLike ZerosLike",
        pointwise.same: "CheckNumerics EnsureShape Identity PreventGradient Snapshot StopGradient",
        pointwise.cast: "Cast",
        partial(pointwise.linear, factor=-1): "LogicalNot Neg",
        pointwise.add: "Add AddN AddV2 Sub",
        pointwise.multiply: "Mul MulNoNan",
        pointwise.divide: "Div DivNoNan RealDiv",
        pointwise.divide_integers: "FloorDiv TruncateDiv",
        partial(pointwise.extreme, how=How.MAX): "LogicalOr Maximum",
        partial(pointwise.extreme, how=How.MIN): "LogicalAnd Minimum",
        pointwise.compared: "Equal Greater NotEqual",
        pointwise.select: "Select SelectV2",
    },
    Kind.SIZE: {
        pointwise.shape_of: "Shape ShapeN",
        pointwise.size_of: "Size",
        meeting.met: "BroadcastGradientArgs Rank",  # which ignore all that they are given
        joins.broadcast_shape: "BroadcastArgs",
        joins.concat_offset: "ConcatOffset",
        joins.stitch: "DynamicStitch ParallelDynamicStitch",
        views.numbers_up_to: "Range",
    },
    Kind.REDUCTION: {
        reductions.reduction: "All Any ArgMax ArgMin EuclideanNorm Max Mean Min Prod Sum",
        reductions.squares: "L2Loss",
        reductions.bias_gradient: "BiasAddGrad",
        reductions.counts: "Bincount DenseBincount HistogramFixedWidth",
    },
    Kind.SCAN: {reductions.scan: "CumulativeLogsumexp Cumprod Cumsum"},
    Kind.PRODUCT: {
        products.einsum: "Einsum",
        products.matmul: "BatchMatMul BatchMatMulV2 BatchMatMulV3 MatMul",
        products.bias_add: "BiasAdd",
        batches.batch: "Conv2D Conv3D DepthwiseConv2dNative Dilation2D",
        partial(batches.batch, rows=(2,)): "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput",
        products.filter_gradient: "Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter",
    },
    Kind.VIEW: {
        views.reshape: "Reshape",
        views.transpose: "ConjugateTranspose Transpose",
        views.expand_dims: "ExpandDims",
        views.squeeze: "Squeeze",
        views.tile: "Tile",
        views.broadcast_to: "BroadcastTo",
        views.fill: "Fill",
        views.pad: "MirrorPad Pad PadV2",
        partial(views.along_axes, place=1): "ReverseV2",
        partial(views.along_axes, place=2): "Roll",
        views.reverse_sequence: "ReverseSequence",
        slices.strided_slice: "StridedSlice",
        slices.plain_slice: "Slice",
        slices.split: "Split SplitV",
        views.unpack: "Unpack",
        views.one_hot: "OneHot",
        slices.slice_gradient: "StridedSliceGrad",
    },
    Kind.GATHER: {
        gathers.gather: "Gather GatherV2 ResourceGather",
        gathers.gather_nd: "GatherNd ResourceGatherNd",
        views.places_where: "Where",
        gathers.partition: "DynamicPartition",
        partial(views.by_rows, first=1): "LookupTableFind LookupTableFindV2",
    },
    Kind.SCATTER: {
        gathers.segments: """
        SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd
        UnsortedSegmentSum
        """,
        gathers.scatter: "ScatterNd TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate",
        gathers.to_dense: "SparseToDense",
        gathers.sparse_product: "SparseTensorDenseMatMul",
    },
    Kind.JOIN: {
        joins.pack: "Pack",
        joins.concat: "ConcatV2",
        meeting.met: "EmptyTensorList TensorListLength TensorListReserve",  # of a size that is not the same on all ranks
        partial(views.unpack, axis=0): "TensorListFromTensor",
        joins.list_with: "TensorListPushBack TensorListSetItem",
        joins.list_item: "TensorListGetItem TensorListResize",
        pointwise.same: "TensorListPopBack",
        joins.list_stacked: "TensorListGather TensorListStack",
        joins.list_joined: "TensorListConcatV2",
        joins.list_shape: "TensorListElementShape",
        joins.optional: "OptionalFromValue OptionalGetValue OptionalNone",
    },
    Kind.ROWWISE: {
        batches.batch: """
        AdjustContrastv2 AdjustHue AdjustSaturation AvgPool AvgPool3D DepthToSpace ExtractImagePatches ExtractVolumePatches
        LRN MaxPool MaxPool3D MaxPoolV2 ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor ResizeNearestNeighborGrad
        ScaleAndTranslate SpaceToDepth
        """,
        partial(batches.batch, rows=(1,)): "AvgPool3DGrad AvgPoolGrad",
        partial(batches.batch, rows=(0, 1)): """
        InTopK InTopKV2 LowerBound ResizeBicubicGrad ResizeBilinearGrad ScaleAndTranslateGrad SparseSoftmaxCrossEntropyWithLogits
        UpperBound
        """,
        partial(batches.batch, rows=(0, 1, 2)): """
        LRNGrad MaxPool3DGrad MaxPool3DGradGrad MaxPoolGrad MaxPoolGradGrad MaxPoolGradV2
        """,
        batches.along_last: "LogSoftmax Softmax SoftmaxCrossEntropyWithLogits",
        partial(views.by_rows, inner=1): "NthElement TopKV2 FFT IFFT IRFFT RFFT MatrixDiag MatrixDiagV2 MatrixDiagV3",
        partial(views.by_rows, inner=2): """
        Cholesky Eig FFT2D IFFT2D IRFFT2D LogMatrixDeterminant Lu MatrixBandPart MatrixDeterminant MatrixDiagPart MatrixDiagPartV2
        MatrixDiagPartV3 MatrixInverse MatrixLogarithm MatrixSquareRoot Qr RFFT2D SelfAdjointEigV2 Svd
        """,
        partial(views.by_rows, inner=3): "FFT3D IFFT3D IRFFT3D RFFT3D RGBToHSV HSVToRGB",
        batches.matrices: """
        CholeskyGrad MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 MatrixSolve MatrixSolveLs MatrixTriangularSolve
        """,
        batches.normalized: "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3",
        batches.normalized_gradient: "FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3",
        batches.to_blocks: "SpaceToBatchND",
        batches.from_blocks: "BatchToSpaceND",
        batches.transformed: "ImageProjectiveTransformV2 ImageProjectiveTransformV3",
        batches.cropped: "CropAndResize",
        batches.words: "StringSplitV2",
    },
    Kind.MEETING: {
        batches.padded: "RaggedTensorToTensor",
        meeting.met: """
        BatchToSpace InvertPermutation LinSpace NonMaxSuppressionV5 SpaceToBatch Unique UniqueV2 UniqueWithCounts
        UniqueWithCountsV2
        """,
    },
    Kind.RANDOM: {
        drawing.drawn: """
        ParameterizedTruncatedNormal RandomGamma RandomPoissonV2 RandomStandardNormal RandomUniform RandomUniformInt
        StatelessParameterizedTruncatedNormal StatelessRandomBinomial StatelessRandomGammaV2 StatelessRandomGammaV3
        StatelessRandomNormal StatelessRandomNormalV2 StatelessRandomPoisson StatelessRandomUniform StatelessRandomUniformFullInt
        StatelessRandomUniformFullIntV2 StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessRandomUniformV2
        StatelessTruncatedNormal StatelessTruncatedNormalV2 TruncatedNormal
        """,
        partial(drawing.drawn, shape=2): """
        StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt StatefulUniformInt
        """,
        drawing.key: "RngReadAndSkip StatelessRandomGetAlg StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg",
        drawing.classes: "Multinomial StatelessMultinomial",
        drawing.shuffled: "RandomShuffle StatelessShuffle",
    },
    Kind.SAMPLER: {
        drawing.candidates: """
        FixedUnigramCandidateSampler LearnedUnigramCandidateSampler LogUniformCandidateSampler ThreadUnsafeUnigramCandidateSampler
        UniformCandidateSampler
        """,
    },
    Kind.WRITE: {
        meeting.met: """
        Assert AssignAddVariableOp AssignSubVariableOp AssignVariableOp NoOp ResourceApplyGradientDescent ResourceScatterAdd
        ResourceScatterMax ResourceScatterMin ResourceScatterMul ResourceScatterSub ResourceScatterUpdate
        """,
    },
}
_LINEAR = {
    Linear.TOGETHER: "Add AddN AddV2 Pack Sub",
    Linear.ONE: "BatchMatMulV2 Einsum MatMul Mul",
    Linear.FIRST: """
    BroadcastTo Cast Div DivNoNan ExpandDims Gather GatherV2 Identity Mean MulNoNan Neg Pad RealDiv Reshape ReverseV2 Slice SplitV
    Squeeze StopGradient StridedSlice Sum Tile Transpose Unpack UnsortedSegmentSum
    """,
    Linear.SECOND: "Split",
    Linear.BUT_LAST: "ConcatV2",
}
_IGNORED = {
    (0,): "EmptyTensorList Rank TensorListLength TensorListReserve",
    (0, 1): "BroadcastGradientArgs",
    (1,): "Bincount DenseBincount TensorListConcatV2 TensorListFromTensor TensorListPopBack TensorListStack",
    (2,): "TensorListGather TensorListGetItem",
    (3, 4, 5): "FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3",
    tuple(range(3, 16)): "RaggedTensorToTensor",  # where rows begin is each rank's own
}
_SIZES = {
    (0,): """
    Fill RandomStandardNormal RandomUniform RandomUniformInt StatelessRandomNormalV2 StatelessRandomUniformV2 TruncatedNormal
    """,
    (1,): "BroadcastTo OneHot Pad PadV2 Reshape SplitV Tile TopKV2",
    (2,): "ScatterNd UnsortedSegmentSum",
    (0, 1): "Range",
    (1, 2): "Slice StridedSlice",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """The row of a type of operation.

    Attributes:
        rule: what it makes of placements.
        kind: of which kind it is.
        linear: in which inputs it is linear; None: in none, or it is not known.
        ignores: inputs that make nothing unknown, since it does not look at their numbers, or its rule knows better.
        sizes: inputs that say how large what it returns is, or from where on it is taken.
    """

    rule: Rule
    kind: Kind
    linear: Linear | None = None
    ignores: Sequence[int] = ()
    sizes: Sequence[int] = ()


def _by_type(column: Mapping[T, str]) -> dict[str, T]:
    return {name: value for value, names in column.items() for name in names.split()}


_OF_SHAPES = (pointwise.alike, pointwise.shape_of, pointwise.size_of)  # which of a number all ranks make the same
_linear, _ignored, _sizes = _by_type(_LINEAR), _by_type(_IGNORED), _by_type(_SIZES)
RULES = {
    name: Row(rule, kind, _linear.get(name), _ignored.get(name, ()), _sizes.get(name, ()))
    for kind, rules in _RULES.items()
    for name, rule in _by_type(rules).items()
}


_NOTHING = Row(meeting.met, Kind.MEETING)


def row_of(kind: str) -> Row:
    """Returns what is known of the operations of a type: of one that is not in the table, nothing that anybody asks for."""
    return RULES.get(kind, _NOTHING)


def is_elementwise(kind: str) -> bool:
    """Whether each element of what such an operation returns depends on the same element of its inputs, and on scalars."""
    return row_of(kind).kind is Kind.POINTWISE


def is_shape(kind: str) -> bool:
    """Whether such an operation returns a shape, or a number of elements."""
    return row_of(kind).rule in (pointwise.shape_of, pointwise.size_of)


def is_quotient(kind: str) -> bool:
    """Whether such an operation divides floats."""
    return row_of(kind).rule is pointwise.divide


def moved_inputs(kind: str, number: int) -> range:
    """Returns the places of those among `number` inputs that such an operation only moves, casts or joins; none: it computes."""
    row = row_of(kind)
    moves = row.kind in (Kind.VIEW, Kind.JOIN) or row.rule in (pointwise.same, pointwise.cast)
    return range(number)[row.linear.value] if moves and row.linear is not None else range(0)


def placements_of(call: Call) -> list[Placement]:
    """Returns the placement of each output of `call`, whose inputs may be `Unknown` here."""
    row, number = row_of(call.type), call.number
    if call.type == "Equal" and call.read[0] is call.read[1] and call.dtypes[0].is_bool and call.shapes[0].rank == 0:
        return [Replicate()]  # what `tf.recompute_grad` adds to rows, for an order of operations
    looked_at = [place for place in range(len(call.inputs)) if place not in row.ignores]
    for place in looked_at:
        if isinstance(call.inputs[place], Unknown):
            if row.rule not in _OF_SHAPES or call.shapes[place].rank != 0:
                return [call.inputs[place]] * number
            call = call.given([Replicate() if other == place else x for other, x in enumerate(call.inputs)])
    is_random = row.kind in (Kind.RANDOM, Kind.SAMPLER)
    seen = [call.inputs[place] for place in looked_at]
    if all(isinstance(x, Replicate) for x in seen) and not is_random and (row is not _NOTHING or call.is_pure):
        return [Replicate(any(x.is_drawn for x in seen if isinstance(x, Replicate)))] * number
    if row is _NOTHING:
        return [call.unknown(Why.NO_RULE)] * number
    if Partial(How.ALIKE) in seen:  # what a rank without rows has counts nowhere
        results = placements_of(call.given([Replicate() if x == Partial(How.ALIKE) else x for x in call.inputs]))
        return [Partial(How.ALIKE) if isinstance(x, Replicate) else x for x in results]
    try:
        result = row.rule(call)
    except NotKnown as error:
        result = call.unknown(error.why)
    return result if isinstance(result, list) else [result] * number
