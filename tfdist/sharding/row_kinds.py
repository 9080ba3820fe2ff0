"""How a tensor of a traced function depends on the rows of the batch: seen in its graph.

x                            rows
keras.ops.tanh(x @ kernel)   rows
ops.sum(x, 0)                a sum over rows
ops.mean(x, 0)               anything else
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.collectives.results import Results
from tfdist.graphs import tape
from tfdist.graphs.constants import value_of
from tfdist.graphs.walks import inputs_first


class RowKind(enum.Enum):
    """How a tensor depends on the rows of the batch."""

    SAME = "the same on every rank: it does not depend on rows"
    ROWS = "axis 0 is the batch, and a row depends on that row alone"
    SUM = "a sum over rows: the ranks' values add up to that of the global batch"
    LENGTHS = "the shape of a tensor of rows"
    OTHER = "anything else"


_SAME, _ROWS, _SUM, _LENGTHS, _OTHER = RowKind

_ELEMENTWISE = frozenset(
    """
    Abs Add AddN AddV2 Cast Ceil ClipByValue Cos Div DivNoNan Elu Equal Erf Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual
    Identity IsFinite IsInf IsNan LeakyRelu Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul
    MulNoNan Neg NotEqual OnesLike Pow RealDiv Reciprocal Relu Relu6 Rint Round Rsqrt Select SelectV2 Selu Sigmoid Sign Sin
    Softplus Softsign Sqrt Square SquaredDifference StopGradient Sub Tan Tanh Xdivy Xlogy ZerosLike
    """.split()
)
_LINEAR_IN_FIRST = frozenset(
    "Cast Div DivNoNan ExpandDims Identity Mean Neg RealDiv Reshape Squeeze StopGradient StridedSlice Sum Transpose".split()
)
_REDUCTIONS = frozenset("All Any EuclideanNorm Max Mean Min Prod Sum".split())
_BY_ROW = frozenset(
    "InTopKV2 LogSoftmax Softmax SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits TopKV2".split()
)
_OF_IMAGES = frozenset("AvgPool AvgPool3D BiasAdd Conv2D Conv3D DepthwiseConv2dNative MaxPool MaxPool3D ResizeBilinear".split())
_SCATTERED_SUMS = frozenset("Bincount DenseBincount ScatterNd UnsortedSegmentSum".split())
_BRANCHES = frozenset("Case If StatelessCase StatelessIf".split())
_FUNCTIONS = frozenset("Case If PartitionedCall StatefulPartitionedCall StatelessCase StatelessIf StatelessWhile While".split())


class RowKinds:
    """The kinds of the tensors of one graph.

    Args:
        of_source: returns the kind of a tensor of which more is known than its operation says, or another tensor, that it is
            like, row by row; None: look at the operation.
        trusts_loops: whether what a loop or a function makes of rows, of a number that is not known before it runs, is taken for
            rows, as a recurrent layer's is; else it is anything else.
    """

    def __init__(self, of_source: Callable[[tf.Tensor], RowKind | tf.Tensor | None], *, trusts_loops: bool = False):
        self._of_source = of_source
        self._trusts_loops = trusts_loops
        self._kinds: dict[str, RowKind] = {}

    def kind(self, tensor: tf.Tensor) -> RowKind:
        for current in inputs_first(tensor, self._inputs, self._kinds):
            source = self._of_source(current)
            if source is None:
                source = self._found(current)
            self._kinds[current.name] = source if isinstance(source, RowKind) else self._kinds[source.name]
        return self._kinds[tensor.name]

    def _inputs(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        source = self._of_source(tensor)
        return list(tensor.op.inputs) if source is None else [] if isinstance(source, RowKind) else [source]

    def _found(self, tensor: tf.Tensor) -> RowKind:
        op, rank = tensor.op, tensor.shape.rank
        kinds = [self._kinds[x.name] for x in op.inputs]
        if op.type == "IdentityN":  # the end of a custom gradient
            return kinds[tensor.value_index]
        if op.type == "ResourceGather":
            return kinds[1] if kinds[1] in (_ROWS, _SAME) and not op.get_attr("batch_dims") else _OTHER
        if op.type in _FUNCTIONS and self._trusts_loops and _ROWS in kinds and rank and tensor.shape[0] is None:
            return _ROWS
        if op.op_def.is_stateful:
            return _SAME if set(kinds) <= {_SAME} and _chooses_alike(op) else _OTHER
        if op.type == "MatMul" and self._is_transposed_rows(op.inputs[0]) and kinds[1] is _ROWS:
            return _SUM if not (op.get_attr("transpose_a") or op.get_attr("transpose_b")) else _OTHER
        if _OTHER in kinds:
            return _OTHER
        if set(kinds) <= {_SAME}:
            return _SAME
        if op.type == "Shape":
            return _LENGTHS if kinds == [_ROWS] else _SAME
        if op.type == "Size":
            return _SUM if kinds == [_ROWS] else _OTHER
        if _SUM in kinds:
            return self._of_sums(op, kinds)
        if _LENGTHS in kinds:
            return self._of_lengths(op, kinds, tensor)
        return self._of_rows(op, kinds, rank)

    def _of_sums(self, op: tf.Operation, kinds: list[RowKind]) -> RowKind:
        if op.type in ("Add", "AddV2", "AddN", "Sub", "Pack") and set(kinds) == {_SUM}:
            return _SUM
        is_first = kinds[0] is _SUM and set(kinds[1:]) <= {_SAME}
        if op.type == "Pack":
            return _LENGTHS if is_first else _OTHER  # a shape [rows, ...] that was put together
        if op.type == "ConcatV2":
            return _SUM if set(kinds[:-1]) == {_SUM} else _OTHER
        if op.type in ("BatchMatMulV2", "Einsum", "MatMul", "Mul"):
            return _SUM if kinds.count(_SUM) == 1 and set(kinds) <= {_SUM, _SAME} else _OTHER
        return _SUM if is_first and op.type in _LINEAR_IN_FIRST else _OTHER

    def _of_lengths(self, op: tf.Operation, kinds: list[RowKind], tensor: tf.Tensor) -> RowKind:
        if op.type in ("Identity", "Cast"):
            return _LENGTHS
        if op.type == "StridedSlice" and kinds[0] is _LENGTHS:
            begin, end = (tf.get_static_value(x) for x in op.inputs[1:3])
            if begin is None or len(begin) != 1 or not op.get_attr("shrink_axis_mask"):
                return _OTHER
            return _SUM if begin[0] == 0 else _SAME if begin[0] > 0 else _OTHER
        if op.type == "BroadcastTo" and kinds[1] is _LENGTHS:
            return _ROWS if kinds[0] is _SAME or op.inputs[0].shape.rank == tensor.shape.rank else _OTHER
        if op.type == "Fill":
            return _ROWS if kinds == [_LENGTHS, _SAME] else _OTHER
        if op.type == "Reshape":
            return _ROWS if kinds == [_ROWS, _LENGTHS] else _OTHER
        return _OTHER

    def _of_rows(self, op: tf.Operation, kinds: list[RowKind], rank: int | None) -> RowKind:
        first = op.inputs[0]
        if op.type in _ELEMENTWISE:
            return _ROWS if self._are_aligned(op, kinds) else _OTHER
        if op.type in _REDUCTIONS:
            axes = reduced_axes(op.inputs[1], first.shape.rank)
            if kinds != [_ROWS, _SAME] or axes is None:
                return _OTHER
            return _ROWS if 0 not in axes else _SUM if op.type == "Sum" else _OTHER
        if op.type in ("Split", "SplitV"):  # the axis is first, or last
            axis, whole = (op.inputs[0], op.inputs[1]) if op.type == "Split" else (op.inputs[2], first)
            place = tf.get_static_value(axis)
            is_along_rows = place is None or whole.shape.rank is None or int(place) % whole.shape.rank == 0
            return _OTHER if is_along_rows or kinds.count(_ROWS) != 1 else _ROWS
        if op.type in _BY_ROW:
            return _ROWS if (first.shape.rank or 0) >= 2 or op.type in ("InTopKV2",) else _OTHER
        if op.type in _SCATTERED_SUMS:
            return _SUM
        if op.type in ("ArgMax", "ArgMin", "ExpandDims", "Cumsum"):
            axes = reduced_axes(op.inputs[1], (first.shape.rank or -1) + (op.type == "ExpandDims"))
            return _ROWS if kinds == [_ROWS, _SAME] and axes and 0 not in axes else _OTHER
        if op.type in _OF_IMAGES:
            return _ROWS if kinds[0] is _ROWS and set(kinds[1:]) <= {_SAME} else _OTHER
        if op.type == "Squeeze":
            axes = op.get_attr("squeeze_dims")
            return _ROWS if first.shape.rank and axes and 0 not in [axis % first.shape.rank for axis in axes] else _OTHER
        if op.type == "OneHot":
            return _ROWS if kinds[0] is _ROWS and op.get_attr("axis") != 0 else _OTHER
        if op.type == "GatherV2":
            return _ROWS if kinds == [_SAME, _ROWS, _SAME] and tf.get_static_value(op.inputs[2]) == 0 else _OTHER
        if op.type in ("Pack", "ConcatV2"):
            values, axis = (kinds, op.get_attr("axis")) if op.type == "Pack" else (kinds[:-1], tf.get_static_value(op.inputs[-1]))
            return _ROWS if rank and axis is not None and axis % rank and set(values) == {_ROWS} else _OTHER
        if op.type in ("MatMul", "BatchMatMulV2", "Einsum"):
            return self._of_products(op, kinds)
        if op.type == "Reshape":
            return _ROWS if _keeps_rows(first.shape, value_of(op.inputs[1])) else _OTHER
        if op.type == "Transpose":
            order = tf.get_static_value(op.inputs[1])
            return _ROWS if order is not None and len(order) and order[0] == 0 else _OTHER
        if op.type == "StridedSlice":
            return _ROWS if _takes_all_rows(op) else _OTHER
        return _OTHER

    def _of_products(self, op: tf.Operation, kinds: list[RowKind]) -> RowKind:
        first, second = op.inputs[0], op.inputs[-1]
        if op.type == "Einsum":
            return _of_einsum(op.get_attr("equation").decode(), kinds)
        if op.type == "BatchMatMulV2":
            ranks = [x.shape.rank or 0 for x in (first, second)]
            is_aligned = (
                kinds == [_ROWS, _ROWS] and ranks[0] == ranks[1] > 2 or kinds == [_ROWS, _SAME] and ranks[0] > 2 >= ranks[1]
            )
            return _ROWS if is_aligned else _OTHER
        if kinds == [_ROWS, _SAME] and not op.get_attr("transpose_a"):
            return _ROWS
        is_sum = kinds == [_ROWS, _ROWS] and op.get_attr("transpose_a") and not op.get_attr("transpose_b")
        return _SUM if is_sum else _OTHER

    def _is_transposed_rows(self, tensor: tf.Tensor) -> bool:
        return tensor.op.type == "Transpose" and tensor.shape.rank == 2 and self._kinds.get(tensor.op.inputs[0].name) is _ROWS

    def _are_aligned(self, op: tf.Operation, kinds: list[RowKind]) -> bool:
        """Whether the inputs of an elementwise operation meet row by row: shapes (b, 1) and (b,) would meet as (b, b)."""
        ranks = {x.shape.rank for x, kind in zip(op.inputs, kinds, strict=True) if kind is _ROWS}
        if len(ranks) > 1 or None in ranks:
            return False
        (rows_rank,) = ranks
        others = [x.shape for x, kind in zip(op.inputs, kinds, strict=True) if kind is _SAME]
        return all(
            shape.rank is not None and (shape.rank < rows_rank or (shape.rank == rows_rank and shape[0] == 1)) for shape in others
        )


def of_collective(tensor: tf.Tensor, program: RankProgram) -> RowKind | tf.Tensor | None:
    """Returns what an `of_source` of `RowKinds` does, of a `tensor` that a collective has returned; of others None."""
    results = program.attachment(Results)
    return RowKind.SAME if results.is_same(tensor) else results.like(tensor)


def argument_kinds(program: RankProgram) -> dict[str, RowKind]:
    """Returns the kinds of the tensors that the function of a rank is given, by name: dense ones have rows, but for numbers."""
    parts = [x for x in tf.nest.flatten(program.arguments, expand_composites=True) if tf.is_symbolic_tensor(x)]
    dense = {id(x) for x in tf.nest.flatten(program.arguments) if isinstance(x, tf.Tensor) and x.shape.rank}
    return {x.name: _ROWS if id(x) in dense else _OTHER for x in parts}


def _of_einsum(equation: str, kinds: list[RowKind]) -> RowKind:
    """Of products whose first letters are the rows': that stay, first of all, or are summed over."""
    given, _, result = equation.partition("->")
    letters = {one[:1] for one, kind in zip(given.split(","), kinds, strict=True) if kind is _ROWS}
    others = "".join(one for one, kind in zip(given.split(","), kinds, strict=True) if kind is not _ROWS)
    rest = "".join(one[1:] for one in given.split(","))
    if len(letters) != 1 or not equation.replace("->", "").replace(",", "").isalpha():
        return _OTHER
    (letter,) = letters
    if letter in others or letter in rest:
        return _OTHER
    return _ROWS if result[:1] == letter else _SUM if letter not in result else _OTHER


def reduced_axes(axes: tf.Tensor, rank: int | None) -> list[int] | None:
    """Returns the axes of a reduction of a tensor of `rank`, None where they are not known."""
    if axes.op.type == "Range":
        return list(range(rank or 1))
    found = tf.get_static_value(axes)
    if found is None or rank is None or rank < 1:
        return None
    return [int(axis) % rank for axis in found.reshape(-1)]


def _keeps_rows(shape: tf.TensorShape, new: Any) -> bool:
    """Whether a reshape to `new` leaves whole rows beside each other, perhaps in several pieces."""
    if new is None or not len(new) or not shape.rank:
        return False
    if new[0] != -1:  # sizes are known
        return bool(shape[0]) and new[0] % shape[0] == 0
    inner = tf.TensorShape(shape[1:]).num_elements()
    pieces = 1
    for size in new[1:]:
        pieces *= int(size)
    return pieces == 1 or (inner is not None and pieces > 0 and inner % pieces == 0)


def _chooses_alike(op: tf.Operation) -> bool:
    """Whether `op` is a branch that gives the same everywhere where its inputs are the same: nothing in it draws."""
    graphs = tape.traced_branches(op) if op.type in _BRANCHES else []
    inside = [inner for graph in graphs for inner in graph.get_operations()]
    return bool(graphs) and not any("Random" in inner.type or inner.type in _FUNCTIONS for inner in inside)


def _takes_all_rows(op: tf.Operation) -> bool:
    if op.inputs[0].shape.rank is None or op.get_attr("new_axis_mask") & 1 or op.get_attr("shrink_axis_mask") & 1:
        return False
    if op.get_attr("ellipsis_mask") & 1:  # it stands for axis 0 if the others are fewer than the axes
        specs = op.inputs[1].shape[0]
        return specs is not None and op.inputs[0].shape.rank >= specs
    strides = tf.get_static_value(op.inputs[3])
    is_whole = op.get_attr("begin_mask") & 1 and op.get_attr("end_mask") & 1
    return bool(is_whole and strides is not None and strides[0] == 1)
