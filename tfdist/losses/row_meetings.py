"""Whether a loss depends on how rows of a batch meet: of those that a rank has not, it knows nothing.

    x - ops.mean(x, 0)                a number of all rows goes back to each: standardised advantages, minibatch deviations
    tf.roll(x, 1, 0), x[::-1]         rows in another order meet those in the first
    x[1:] - x[:-1], x - x[0]          a part of the rows meets another, or all
    x[:, None] - x[None]              all pairs
    tf.gather(of_groups, group)       sums or means over groups of rows go back to them
    tf.sort(x, 0), tf.cumsum(x, 0)    along the axis of rows
    einsum("id,jd->ij", x, y)         the same

Rows of a sequence that is turned to (time, rows, features) meet nothing: where their axis is, is followed.

What `BatchNormalization` does is told in the documents, and no fault here.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist.graphs.constants import value_of
from tfdist.graphs.walks import inputs_first
from tfdist.losses.row_parts import part_of_rows
from tfdist.sharding import gradient_graph
from tfdist.sharding.row_kinds import RowKind, RowKinds, reduced_axes

_MOVING = ("ExpandDims", "StridedSlice", "Transpose")
_REDUCTIONS = ("Max", "Mean", "Min", "Prod", "Sum")
_OF_GROUPS = frozenset("SegmentMean SegmentSum UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentSum".split())
_ALONG_LAST = ("LogSoftmax", "Softmax", "TopKV2")


class RowMeetings:
    """What meets what in the graph of one rank.

    Args:
        of_source: the kind of a tensor that is not looked behind, or another that it is like (see `RowKinds`).
    """

    def __init__(self, of_source: Callable[[tf.Tensor], RowKind | tf.Tensor | None]):
        self._of_source = of_source
        self._kinds = RowKinds(of_source)
        self._of_all: dict[str, bool] = {}  # by name: whether it is a number of the rank's rows together
        self._parts: dict[str, str] = {}  # by name: which part of the rank's rows it is of, in words
        self._moved: dict[str, int] = {}  # tensors whose axis of rows is no longer the first, and which it is, from the end

    def found_in(self, loss: tf.Tensor) -> bool:
        """Whether rows meet in what `loss` is computed of."""
        for tensor in inputs_first(loss, self._inputs, self._of_all):
            inputs = self._inputs(tensor)
            if (source := self._passed_on(tensor)) is not None:
                self._pass_on(source, tensor)
                continue
            if inputs and self._meet(tensor.op):
                return True
            self._of_all[tensor.name] = bool(inputs) and self._is_of_all(tensor)
            if inputs and (part := self._part(tensor)):
                self._parts[tensor.name] = part
        return False

    def _inputs(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        if isinstance(self._of_source(tensor), RowKind):
            return []
        source = self._passed_on(tensor)
        return list(tensor.op.inputs) if source is None else [source]

    def _passed_on(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns what `tensor` is, at the end of a custom gradient, or is like, row by row, behind a collective; else None."""
        source = self._of_source(tensor)
        return gradient_graph.passed_on(tensor) if source is None else None if isinstance(source, RowKind) else source

    def _pass_on(self, source: tf.Tensor, tensor: tf.Tensor) -> None:
        self._of_all[tensor.name] = self._of_all[source.name]
        if source.name in self._parts:
            self._parts[tensor.name] = self._parts[source.name]
        if source.name in self._moved:
            self._moved[tensor.name] = self._moved[source.name]

    def _is_rows(self, x: tf.Tensor) -> bool:
        return self._kinds.kind(x) is RowKind.ROWS

    def are_pairs(self, op: tf.Operation) -> bool:
        """Whether an Einsum `op` of two tensors of rows has a number for every two rows."""
        letters = op.get_attr("equation").decode().partition("->")[0].split(",")
        return len(letters) == 2 and all(map(self._is_rows, op.inputs)) and letters[0][:1] != letters[1][:1]

    def _row_axis(self, x: tf.Tensor) -> int | None:
        """Returns the axis of rows of `x`, from the end; None: it has none, or it is not known."""
        return -x.shape.rank if self._is_rows(x) and x.shape.rank else self._moved.get(x.name)

    def _part(self, tensor: tf.Tensor) -> str | None:
        """Returns of which part of the rank's rows `tensor` is, in words; None: of all, of none, or it is not known."""
        op = tensor.op
        found = part_of_rows(tensor) if op.inputs and self._is_rows(_sliced(op)) else None
        if found or not (gradient_graph.is_elementwise(op) or op.type in ("BiasAdd", "MatMul", *_REDUCTIONS)):
            return found
        if op.type in _REDUCTIONS:
            axes = reduced_axes(op.inputs[1], op.inputs[0].shape.rank)
            return self._parts.get(op.inputs[0].name) if axes is not None and 0 not in axes else None
        return next((self._parts[x.name] for x in self._inputs(tensor) if x.name in self._parts), None)

    def _is_of_all(self, tensor: tf.Tensor) -> bool:
        op = tensor.op
        if op.type in _OF_GROUPS:
            return self._is_rows(op.inputs[0])
        if op.type in _REDUCTIONS and self._is_rows(op.inputs[0]):
            axes = reduced_axes(op.inputs[1], op.inputs[0].shape.rank)
            return axes is not None and 0 in axes
        axis = None
        if gradient_graph.is_elementwise(op):
            axis = next((self._moved[x.name] for x in op.inputs if x.name in self._moved), None)
        elif op.type in _MOVING and self._is_rows(op.inputs[0]):
            axis = _moved_axis(op)
        if axis is not None:
            self._moved[tensor.name] = axis
        return any(self._of_all[x.name] for x in self._inputs(tensor)) and not self._is_rows(tensor)

    def _meet(self, op: tf.Operation) -> bool:
        parts = {self._parts[x.name] for x in op.inputs if x.name in self._parts}
        if parts and gradient_graph.is_elementwise(op) and (len(parts) > 1 or any(self._is_rows(x) for x in op.inputs)):
            return True
        axes = [self._row_axis(x) for x in op.inputs]
        if all(axis is None for axis in axes):
            return False
        if op.type in ("Roll", "ReverseV2", "StridedSlice"):
            return self._is_rows(op.inputs[0]) and _reorders_rows(op)
        if op.type in _ALONG_LAST:
            return axes[0] == -1
        if op.type == "Cumsum":
            along = tf.get_static_value(op.inputs[1])
            rank = op.inputs[0].shape.rank
            return axes[0] is not None and along is not None and rank is not None and int(along) % rank == axes[0] % rank
        if op.type == "GatherV2" and self._is_rows(op.inputs[1]) and not self._is_rows(op.inputs[0]):
            return self._of_all[op.inputs[0].name]
        if op.type == "GatherV2":
            return self._is_rows(op.inputs[0]) and op.inputs[1].op.type == "RandomShuffle" and not op.get_attr("batch_dims")
        if not gradient_graph.is_elementwise(op):
            return False
        if any(self._is_rows(x) for x in op.inputs) and any(self._of_all[x.name] for x in op.inputs):
            return True
        found = {axis for axis in axes if axis is not None}
        return len(found) > 1 and any(x.name in self._moved for x in op.inputs)


def _moved_axis(op: tf.Operation) -> int | None:
    """Returns the axis of rows, the first of the input, in what `op` returns, from the end; None: it is the first still."""
    rank = op.outputs[0].shape.rank
    if rank is None:
        return None
    if op.type == "StridedSlice":
        mask, place = op.get_attr("new_axis_mask"), 0
        while mask >> place & 1:
            place += 1
        return place - rank if place else None
    given = value_of(op.inputs[1])
    if given is None or not given.size:
        return None
    place = list(given).index(0) if op.type == "Transpose" else int(given.flat[0] in (0, -rank))
    return place - rank if place else None


def _sliced(op: tf.Operation) -> tf.Tensor:
    return op.inputs[1] if op.type == "Split" else op.inputs[0]


def _reorders_rows(op: tf.Operation) -> bool:
    if op.type == "StridedSlice":
        strides = tf.get_static_value(op.inputs[3])
        masks = op.get_attr("new_axis_mask") | op.get_attr("ellipsis_mask")
        return strides is not None and not masks & 1 and int(strides[0]) < 0
    axes = tf.get_static_value(op.inputs[-1])
    return axes is not None and 0 in axes.reshape(-1)
