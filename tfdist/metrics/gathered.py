"""The rows of all ranks, for a metric that is no sum over rows: its arguments are gathered before it is updated.

Several metrics of a step gather the same predictions once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, all_reduce, can_be_gathered, gather_rows
from tfdist.metrics.arguments import Arguments


def why_not(arguments: Arguments) -> str:
    """Returns why `arguments` cannot be gathered, "" if they can."""
    if arguments.others:
        return f"a {type(arguments.others[0]).__name__} cannot be gathered from the ranks"
    for tensor in arguments.tensors:
        if not can_be_gathered(tensor):
            return f"a tensor of dtype {tensor.dtype.name} cannot be gathered from the ranks"
    return ""


class GatheredBatch:
    """The tensors that one rank has gathered in one trace; an attachment of its program."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._gathered: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}  # with what was gathered: a number is that of a living object

    def of(self, arguments: Arguments, fraction: Callable[[], tf.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns `arguments` with all ranks' rows; numbers averaged, weighted by `fraction()`, the rank's part of the rows."""
        return arguments.replaced([self._whole(tensor, fraction) for tensor in arguments.tensors])

    def _whole(self, tensor: tf.Tensor, fraction: Callable[[], tf.Tensor]) -> tf.Tensor:
        if id(tensor) not in self._gathered:
            self._gathered[id(tensor)] = (tensor, self._gather(tensor, fraction))
        # Another object each time: a mask is set on it.
        return tf.identity(self._gathered[id(tensor)][1])

    def _gather(self, tensor: tf.Tensor, fraction: Callable[[], tf.Tensor]) -> tf.Tensor:
        if tensor.shape.rank == 0:
            if not tensor.dtype.is_floating:
                return tensor
            part = tf.cast(fraction(), tensor.dtype)
            return all_reduce(tf.where(part > 0, part * tensor, tf.zeros_like(tensor)), "data", label="metrics/scalar")
        return gather_rows(tensor, "metrics/rows")
