"""The rows of all ranks, for a metric that is no sum over rows: its arguments are gathered before it is updated.

Several metrics of a step gather the same predictions once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, all_gather, all_reduce
from tfdist.metrics.arguments import Arguments

_CARRIED = {tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64}  # as they are; others in a wider one
_WIDENED = {
    tf.bool: tf.int32,
    tf.uint8: tf.int32,
    tf.int8: tf.int32,
    tf.uint16: tf.int32,
    tf.int16: tf.int32,
    tf.uint32: tf.int64,
}


def why_not(arguments: Arguments) -> str:
    """Returns why `arguments` cannot be gathered, "" if they can."""
    if arguments.others:
        return f"a {type(arguments.others[0]).__name__} cannot be gathered from the ranks"
    for tensor in arguments.tensors:
        if tensor.dtype not in _CARRIED and tensor.dtype not in _WIDENED:
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
        carried = tf.cast(tensor, _WIDENED.get(tensor.dtype, tensor.dtype))
        if carried.shape[1:].is_fully_defined():
            whole = all_gather(carried, "data", uneven=True, label="metrics/rows")
        else:  # lengths that only run time knows are the same on all ranks, which have rows of one batch
            flat = all_gather(tf.reshape(carried, [-1]), "data", uneven=True, label="metrics/rows")
            inner = tf.shape(carried)[1:]
            # Not -1, which no rows of no length would leave open.
            rows = tf.math.floordiv(tf.size(flat), tf.maximum(tf.reduce_prod(inner), 1))
            whole = tf.reshape(flat, tf.concat([[rows], inner], 0))
        whole.set_shape([None, *tensor.shape[1:]] if tensor.shape.rank else None)
        return tf.cast(whole, tensor.dtype)
