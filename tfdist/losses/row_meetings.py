"""Whether a loss depends on how rows of a batch meet: of those that a rank has not, it knows nothing.

    x - ops.mean(x, 0)                a number of all rows goes back to each: standardised advantages, minibatch deviations
    tf.roll(x, 1, 0), x[::-1]         rows in another order meet those in the first
    x[:, None] - x[None]              all pairs

What `BatchNormalization` does is told in the documents, and no fault here.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist.sharding import gradient_graph
from tfdist.sharding.row_kinds import RowKind, RowKinds, reduced_axes

_MOVING = ("ExpandDims", "StridedSlice", "Transpose")
_REDUCTIONS = ("Max", "Mean", "Min", "Prod", "Sum")


class RowMeetings:
    """What meets what in the graph of one rank.

    Args:
        of_source: the kind of a tensor that is not looked behind (see `RowKinds`).
    """

    def __init__(self, of_source: Callable[[tf.Tensor], RowKind | None]):
        self._of_source = of_source
        self._kinds = RowKinds(of_source)
        self._of_all: dict[str, bool] = {}  # by name: whether it is a number of the rank's rows together
        self._moved: set[str] = set()  # rows whose axis is no longer the first

    def found_in(self, loss: tf.Tensor) -> bool:
        """Whether rows meet in what `loss` is computed of."""
        waiting = [loss]
        while waiting:
            tensor = waiting[-1]
            inputs = [] if self._of_source(tensor) else list(tensor.op.inputs)
            missing = [x for x in inputs if x.name not in self._of_all]
            if tensor.name not in self._of_all and missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            if tensor.name not in self._of_all:
                if inputs and self._meet(tensor.op):
                    return True
                self._of_all[tensor.name] = bool(inputs) and self._is_of_all(tensor)
        return False

    def _is_rows(self, x: tf.Tensor) -> bool:
        return self._kinds.kind(x) is RowKind.ROWS

    def _is_of_all(self, tensor: tf.Tensor) -> bool:
        op = tensor.op
        if op.type in _REDUCTIONS and self._is_rows(op.inputs[0]):
            axes = reduced_axes(op.inputs[1], op.inputs[0].shape.rank)
            return axes is not None and 0 in axes
        is_passed_on = gradient_graph.is_elementwise(op) and len(op.inputs) == 1 and op.inputs[0].name in self._moved
        if is_passed_on or (op.type in _MOVING and self._is_rows(op.inputs[0]) and _moves_rows(op)):
            self._moved.add(tensor.name)
        return any(self._of_all[x.name] for x in op.inputs) and not self._is_rows(tensor)

    def _meet(self, op: tf.Operation) -> bool:
        rows = [x for x in op.inputs if self._is_rows(x)]
        if not rows:
            return False
        if op.type in ("Roll", "ReverseV2", "StridedSlice"):
            return rows[0] is op.inputs[0] and _reorders_rows(op)
        if not gradient_graph.is_elementwise(op):
            return False
        return any(self._of_all[x.name] or x.name in self._moved for x in op.inputs)


def _moves_rows(op: tf.Operation) -> bool:
    """Whether the axis of rows, the first, is another one in what `op` returns."""
    if op.type == "StridedSlice":
        return bool(op.get_attr("new_axis_mask") & 1)
    given = tf.get_static_value(op.inputs[1])
    if given is None or not given.size:
        return False
    return int(given.flat[0]) != 0 if op.type == "Transpose" else int(given.flat[0]) == 0


def _reorders_rows(op: tf.Operation) -> bool:
    if op.type == "StridedSlice":
        strides = tf.get_static_value(op.inputs[3])
        masks = op.get_attr("new_axis_mask") | op.get_attr("ellipsis_mask")
        return strides is not None and not masks & 1 and int(strides[0]) < 0
    axes = tf.get_static_value(op.inputs[-1])
    return axes is not None and 0 in axes.reshape(-1)
