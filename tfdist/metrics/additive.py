"""Whether an update of a metric adds up over ranks: seen in the graph of the update.

A rank that updates a metric with its own rows leaves a summand of the metric's state if the state grows by sums over rows:

    self.total.assign_add(ops.sum(ops.abs(y_true - y_pred)))        adds up
    self.largest.assign(ops.maximum(self.largest, ops.max(y_pred)))  does not
    self.total.assign_add(ops.mean(y_true == y_pred))                does not: it is no sum over rows

The update is traced into a graph that is thrown away, and every value that is assigned there is followed back to what it is
computed of. What this file does not know counts as not adding up.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.graphs import tape
from tfdist.metrics.arguments import dense, mapped, others
from tfdist.placements.graph_facts import TracedFacts
from tfdist.placements.kinds import How, Partial, Placement, Replicate
from tfdist.placements.telling import is_sum

_FUNCTIONS = (*tape.BRANCHES, *tape.LOOPS, *tape.CALLS)


def adds_up(update: Callable[..., Any], given: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether the states that `update` assigns, called with the arguments `given`, grow by sums over their rows."""
    tensors = dense(given)

    def traced(*found: tf.Tensor) -> None:
        new = dict(zip(map(id, tensors), found, strict=True))
        args, kwargs = mapped(lambda x: new[id(x)], given)
        update(*args, **kwargs)

    specs = [tf.TensorSpec([None, *x.shape[1:]] if x.shape.rank else x.shape, x.dtype) for x in tensors]
    try:
        graph = tf.function(traced, autograph=False).get_concrete_function(*specs).graph
        return not others(given) and _Update(graph).adds_up()
    except Exception:  # noqa: BLE001  what cannot be traced here is not known to add up
        return False


class _Update(TracedFacts):
    """The graph of one update, in which a state of the metric is a rank's summand."""

    def __init__(self, graph: Any):
        super().__init__(graph)
        self._operations = graph.get_operations()
        self._states = {op.inputs[0].name for op in self._operations if tape.writes(op)}

    def adds_up(self) -> bool:
        for op in self._operations:
            if tape.writes(op):
                if not is_sum(self.of(op.inputs[1])):
                    return False
            elif op.type in _FUNCTIONS or (op.type != "ReadVariableOp" and any(x.dtype == tf.resource for x in op.inputs)):
                return False  # what is assigned in a branch, a loop or a nested function is not seen
        return True

    def _leaf(self, tensor: tf.Tensor) -> Placement | tf.Tensor | None:
        if tensor.op.type != "ReadVariableOp":
            return super()._leaf(tensor)
        return Partial(How.SUM) if tensor.op.inputs[0].name in self._states else Replicate()
