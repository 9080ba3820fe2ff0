"""The rows of all ranks, for a metric that is no sum over rows: its arguments are gathered before it is updated.

Several metrics of a step gather the same predictions once.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, can_be_gathered, gather_rows
from tfdist.metrics.arguments import dense, mapped, others
from tfdist.placements.telling import as_whole


def why_not(given: Any) -> str:
    """Returns why the arguments `given` cannot be gathered, "" if they can."""
    if found := others(given):
        return f"a {type(found[0]).__name__} cannot be gathered from the ranks"
    for tensor in dense(given):
        if not can_be_gathered(tensor):
            return f"a tensor of dtype {tensor.dtype.name} cannot be gathered from the ranks"
    return ""


class GatheredBatch:
    """The tensors that one rank has gathered in one trace; an attachment of its program."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._gathered: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}  # with what was gathered: a number is that of a living object

    def of(self, given: Any) -> Any:
        """Returns the arguments `given` with all ranks' rows, and numbers as they are on one device."""
        return mapped(self._whole, given)

    def _whole(self, tensor: tf.Tensor) -> tf.Tensor:
        if id(tensor) not in self._gathered:
            is_number = tensor.shape.rank == 0
            whole = as_whole(self._program, tensor, "metrics/scalar") if is_number else gather_rows(tensor, "metrics/rows")
            self._gathered[id(tensor)] = tensor, whole
        # Another object each time: a mask is set on it.
        return tf.identity(self._gathered[id(tensor)][1])
