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

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.metrics.arguments import Arguments
from tfdist.sharding.row_kinds import RowKind, RowKinds

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
        self._kinds = RowKinds(self._of_source)

    def adds_up(self) -> bool:
        for op in self._operations:
            if op.type in _ASSIGNMENTS:
                handle, value = op.inputs
                is_summand = _ASSIGNMENTS[op.type]
                if not (self._kinds.kind(value) is RowKind.SUM if is_summand else self._is_grown(value, handle)):
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
            return self._is_grown(op.inputs[0], handle) and self._kinds.kind(op.inputs[1]) is RowKind.SUM
        if op.type in ("Add", "AddV2", "AddN"):
            others = [x for x in op.inputs if self._kinds.kind(x) is not RowKind.SUM]
            return len(others) == 1 and self._is_grown(others[0], handle)
        return False

    def _of_source(self, tensor: tf.Tensor) -> RowKind | None:
        if tensor.op.type == "Placeholder":
            if id(tensor) in self._captured:
                return RowKind.OTHER if tf.is_symbolic_tensor(self._captured[id(tensor)]) else RowKind.SAME
            return RowKind.OTHER if tensor.shape.rank == 0 else RowKind.ROWS
        if tensor.op.type == "ReadVariableOp":
            return RowKind.OTHER if id(tensor.op.inputs[0]) in self._states else RowKind.SAME
        return None
