"""Whether an update of a metric adds up over ranks: seen in the graph of the update.

A rank that updates a metric with its own rows leaves a summand of the metric's state if the state grows by sums over rows:

    self.total.assign_add(ops.sum(ops.abs(y_true - y_pred)))        adds up
    self.largest.assign(ops.maximum(self.largest, ops.max(y_pred)))  does not
    self.total.assign_add(ops.mean(y_true == y_pred))                does not: it is no sum over rows

The update is traced into a graph that is thrown away, and every value that is assigned there is followed back to what it is
computed of. What this file does not know counts as not adding up: such a metric is updated with the rows of all ranks, which is
exact for every metric and costs their all-gather.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.metrics.arguments import Arguments


class _Kind(enum.Enum):
    """How a tensor depends on the rows of the batch."""

    SAME = "the same on every rank: it does not depend on rows"
    ROWS = "axis 0 is the batch, and a row depends on that row alone"
    SUM = "a sum over rows: the ranks' values add up to that of the global batch"
    LENGTHS = "the shape of a tensor of rows"
    OTHER = "anything else"


_SAME, _ROWS, _SUM, _LENGTHS, _OTHER = _Kind

_ELEMENTWISE = frozenset(
    """
    Abs Add AddN AddV2 Cast Ceil ClipByValue Cos Div DivNoNan Elu Equal Erf Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual
    Identity IsFinite IsInf IsNan LeakyRelu Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul
    MulNoNan Neg NotEqual OnesLike Pow RealDiv Reciprocal Relu Relu6 Rint Round Rsqrt Select SelectV2 Selu Sigmoid Sign Sin
    Softplus Softsign Sqrt Square SquaredDifference StopGradient Sub Tan Tanh Xdivy Xlogy ZerosLike
    """.split()
)
_LINEAR = frozenset("Add AddN AddV2 Cast Identity Neg StopGradient Sub Pack ConcatV2 Reshape Squeeze ExpandDims".split())
_SCALED = frozenset("Mul RealDiv Div DivNoNan".split())
_REDUCTIONS = frozenset("All Any EuclideanNorm Max Mean Min Prod Sum".split())
_BY_ROW = frozenset(
    "InTopKV2 LogSoftmax Softmax SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits TopKV2".split()
)
_SCATTERED_SUMS = frozenset("Bincount DenseBincount ScatterNd UnsortedSegmentSum".split())
_FUNCTIONS = frozenset("Case If PartitionedCall StatefulPartitionedCall StatelessCase StatelessIf StatelessWhile While".split())
_ASSIGNMENTS = {"AssignVariableOp": False, "AssignAddVariableOp": True, "AssignSubVariableOp": True}  # whether of a summand


def adds_up(update: Callable[..., Any], arguments: Arguments) -> bool:
    """Whether the states that `update(*args, **kwargs)` assigns grow by sums over the rows of its arguments."""

    def traced(*tensors: tf.Tensor) -> None:
        args, kwargs = arguments.replaced(tensors)
        update(*args, **kwargs)

    specs = [_without_rows(tensor) for tensor in arguments.tensors]
    try:
        graph = tf.function(traced, autograph=False).get_concrete_function(*specs).graph
        return not arguments.others and _Update(graph).adds_up()
    except Exception:  # noqa: BLE001  what cannot be traced here is not known to add up
        return False


def _without_rows(tensor: tf.Tensor) -> tf.TensorSpec:
    shape = tensor.shape
    return tf.TensorSpec(shape if not shape.rank else [None, *shape[1:]], tensor.dtype)


class _Update:
    """The graph of one update."""

    def __init__(self, graph: Any):
        self._operations = graph.get_operations()
        self._captured = {id(inner): outer for outer, inner in graph.captures}
        self._states = {id(op.inputs[0]) for op in self._operations if op.type in _ASSIGNMENTS}
        self._kinds: dict[str, _Kind] = {}

    def adds_up(self) -> bool:
        for op in self._operations:
            if op.type in _ASSIGNMENTS:
                handle, value = op.inputs
                is_summand = _ASSIGNMENTS[op.type]
                if not (self._kind(value) is _SUM if is_summand else self._is_grown(value, handle)):
                    return False
            elif op.type in _FUNCTIONS or (op.type != "ReadVariableOp" and any(x.dtype == tf.resource for x in op.inputs)):
                return False  # what is assigned in a branch, a loop or a nested function is not seen
        return True

    def _is_grown(self, value: tf.Tensor, handle: tf.Tensor) -> bool:
        """Whether `value` is the state of `handle` plus a sum over rows."""
        op = value.op
        if op.type == "ReadVariableOp":
            return op.inputs[0] is handle
        if op.type in ("Identity", "Cast"):
            return self._is_grown(op.inputs[0], handle)
        if op.type == "Sub":
            return self._is_grown(op.inputs[0], handle) and self._kind(op.inputs[1]) is _SUM
        if op.type in ("Add", "AddV2", "AddN"):
            others = [x for x in op.inputs if self._kind(x) is not _SUM]
            return len(others) == 1 and self._is_grown(others[0], handle)
        return False

    def _kind(self, tensor: tf.Tensor) -> _Kind:
        if tensor.name not in self._kinds:
            self._kinds[tensor.name] = self._found(tensor)
        return self._kinds[tensor.name]

    def _found(self, tensor: tf.Tensor) -> _Kind:
        op, rank = tensor.op, tensor.shape.rank
        if op.type == "Placeholder":
            if id(tensor) in self._captured:
                return _OTHER if tf.is_symbolic_tensor(self._captured[id(tensor)]) else _SAME
            return _OTHER if rank == 0 else _ROWS
        if op.type == "ReadVariableOp":
            return _OTHER if id(op.inputs[0]) in self._states else _SAME
        kinds = [self._kind(x) for x in op.inputs]
        if op.op_def.is_stateful or _OTHER in kinds:
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

    def _of_sums(self, op: tf.Operation, kinds: list[_Kind]) -> _Kind:
        if op.type in ("Add", "AddV2", "AddN", "Sub", "Pack"):
            return _SUM if set(kinds) == {_SUM} else self._rows_of_shape(op, kinds)
        if op.type == "ConcatV2":
            return _SUM if set(kinds[:-1]) == {_SUM} else _OTHER
        if op.type == "Mul":
            return _SUM if kinds.count(_SUM) == 1 and set(kinds) <= {_SUM, _SAME} else _OTHER
        if op.type in _LINEAR | _SCALED | {"Sum", "Mean", "StridedSlice", "Transpose"}:
            return _SUM if kinds[0] is _SUM and set(kinds[1:]) <= {_SAME} else self._rows_of_shape(op, kinds)
        return self._rows_of_shape(op, kinds)

    def _rows_of_shape(self, op: tf.Operation, kinds: list[_Kind]) -> _Kind:
        """Of a shape [rows, ...] that was put together, and what is shaped by it."""
        if op.type == "Pack" and kinds[0] is _SUM and set(kinds[1:]) <= {_SAME}:
            return _LENGTHS
        return _OTHER

    def _of_lengths(self, op: tf.Operation, kinds: list[_Kind], tensor: tf.Tensor) -> _Kind:
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

    def _of_rows(self, op: tf.Operation, kinds: list[_Kind], rank: int | None) -> _Kind:
        first = op.inputs[0]
        if op.type in _ELEMENTWISE:
            return _ROWS if self._are_aligned(op, kinds) else _OTHER
        if op.type in _REDUCTIONS:
            axes = _axes(op.inputs[1], first.shape.rank)
            if kinds != [_ROWS, _SAME] or axes is None:
                return _OTHER
            return _ROWS if 0 not in axes else _SUM if op.type == "Sum" else _OTHER
        if op.type in _BY_ROW:
            return _ROWS if (first.shape.rank or 0) >= 2 or op.type in ("InTopKV2",) else _OTHER
        if op.type in _SCATTERED_SUMS:
            return _SUM
        if op.type in ("ArgMax", "ArgMin", "ExpandDims", "Cumsum"):
            axes = _axes(op.inputs[1], (first.shape.rank or -1) + (op.type == "ExpandDims"))
            return _ROWS if kinds == [_ROWS, _SAME] and axes and 0 not in axes else _OTHER
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
        if op.type == "MatMul":
            if kinds == [_ROWS, _SAME] and not op.get_attr("transpose_a"):
                return _ROWS
            is_sum = kinds == [_ROWS, _ROWS] and op.get_attr("transpose_a") and not op.get_attr("transpose_b")
            return _SUM if is_sum else _OTHER
        if op.type == "Reshape":
            return _ROWS if _keeps_rows(first.shape, tf.get_static_value(op.inputs[1])) else _OTHER
        if op.type == "Transpose":
            order = tf.get_static_value(op.inputs[1])
            return _ROWS if order is not None and len(order) and order[0] == 0 else _OTHER
        if op.type == "StridedSlice":
            return _ROWS if _takes_all_rows(op) else _OTHER
        return _OTHER

    def _are_aligned(self, op: tf.Operation, kinds: list[_Kind]) -> bool:
        """Whether the inputs of an elementwise operation meet row by row: shapes (b, 1) and (b,) would meet as (b, b)."""
        ranks = {x.shape.rank for x, kind in zip(op.inputs, kinds, strict=True) if kind is _ROWS}
        if len(ranks) > 1 or None in ranks:
            return False
        (rows_rank,) = ranks
        others = [x.shape for x, kind in zip(op.inputs, kinds, strict=True) if kind is _SAME]
        return all(
            shape.rank is not None and (shape.rank < rows_rank or (shape.rank == rows_rank and shape[0] == 1)) for shape in others
        )


def _axes(axes: tf.Tensor, rank: int | None) -> list[int] | None:
    """Returns the axes of a reduction of a tensor of `rank`, None where they are not known."""
    if axes.op.type == "Range":
        return list(range(rank or 1))
    found = tf.get_static_value(axes)
    if found is None or rank is None or rank < 1:
        return None
    return [int(axis) % rank for axis in found.reshape(-1)]


def _keeps_rows(shape: tf.TensorShape, new: Any) -> bool:
    """Whether a reshape to `new` leaves whole rows beside each other, perhaps in several pieces."""
    if new is None or not len(new) or new[0] != -1 or shape.rank is None:
        return False
    inner = tf.TensorShape(shape[1:]).num_elements()
    pieces = 1
    for size in new[1:]:
        pieces *= int(size)
    return pieces == 1 or (inner is not None and pieces > 0 and inner % pieces == 0)


def _takes_all_rows(op: tf.Operation) -> bool:
    if op.inputs[0].shape.rank is None or op.get_attr("new_axis_mask") & 1 or op.get_attr("shrink_axis_mask") & 1:
        return False
    if op.get_attr("ellipsis_mask") & 1:  # it stands for axis 0 if the others are fewer than the axes
        specs = op.inputs[1].shape[0]
        return specs is not None and op.inputs[0].shape.rank >= specs
    strides = tf.get_static_value(op.inputs[3])
    is_whole = op.get_attr("begin_mask") & 1 and op.get_attr("end_mask") & 1
    return bool(is_whole and strides is not None and strides[0] == 1)
