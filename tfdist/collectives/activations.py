"""Collectives of activations: tensors (batch, ..., features) whose leading sizes are often known at run time only.

The ranks of a group along "tensor" or "pipe" compute on the same examples, so their activations have one shape, whatever it
turns out to be. Static sizes travel as they are. Else the dimensions from the last unknown one to the left are taken as rows.
The rows are padded to a power of two, because a collective's key is bound to one shape for the life of the process:

    (None, 65, 32)   rows of (65, 32)     40 examples travel as 64
    (None, None, 32) rows of (32,)        40 x 65 = 2600 positions travel as 4096

Batches whose size is a power of two, or known (`drop_remainder=True`), cost no padding. No gradients here: the regions of
`tfdist.layers` pair these with their adjoints.
"""

import functools
import operator
from collections.abc import Callable

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import group_ops
from tfdist.collectives.instance_keys import power_of_two
from tfdist.collectives.program import RankProgram
from tfdist.collectives.results import noted
from tfdist.collectives.transports.kernel_settings import with_zeros


def all_reduce(program: RankProgram, x: tf.Tensor, mesh_axis: str, label: str, reduce_op: str = "sum") -> tf.Tensor:
    """Reduces `x` ("sum", "max", "min") elementwise over the group of `mesh_axis`."""
    ranks = program.group_ranks(mesh_axis)
    if len(ranks) == 1:
        return x
    with tf.device(program.device):
        rows, restore = _as_rows(x)
        reduced = restore(group_ops.all_reduce(program, rows, ranks, reduce_op, label), x)
        return noted(program, reduced, ranks, x, is_like=True)


def all_gather(program: RankProgram, x: tf.Tensor, mesh_axis: str, axis: int, label: str) -> tf.Tensor:
    """Concatenates the group's tensors, of one shape, along `axis`."""
    ranks = program.group_ranks(mesh_axis)
    if len(ranks) == 1:
        return x
    with tf.device(program.device):
        rows, restore = _as_rows(x)
        gathered = tf.split(group_ops.all_gather(program, rows, ranks, label), len(ranks))
        whole = tf.concat([restore(part, x) for part in gathered], axis)
        return noted(program, whole, ranks, x, is_like=axis % x.shape.rank != 0)


def reduce_scatter(program: RankProgram, x: tf.Tensor, mesh_axis: str, axis: int, label: str) -> tf.Tensor:
    """Sums `x` over the group and returns this rank's equal part of the sum along `axis`."""
    ranks = program.group_ranks(mesh_axis)
    if len(ranks) == 1:
        return x
    with tf.device(program.device):
        parts = split(x, len(ranks), axis)
        rows, restore = _as_rows(tf.stack(parts), outer=1)
        scattered = restore(group_ops.reduce_scatter(program, rows, ranks, label), parts[0])
        return noted(program, scattered, ranks, x, is_like=axis % x.shape.rank != 0, is_same=False)


def split(x: tf.Tensor, parts: int, axis: int) -> list[tf.Tensor]:
    """Splits `x` in equal `parts` along `axis`.

    Raises:
        ValueError: `parts` does not divide the size of `axis`, where it is known.
        tf.errors.InvalidArgumentError: the same, while running, where it is not.
    """
    axis %= x.shape.rank
    size = x.shape[axis]
    if size is not None and size % parts:
        lower = size // parts * parts
        raise errors.value_error(
            f"Axis {axis} of a tensor of shape {tuple(x.shape)} is sharded in equal parts, one a rank, but {parts} ranks do not "
            f"divide {size}.",
            fix=f"Sizes that work: {lower or parts}, {lower + parts}. Pad it.",
        )
    return tf.split(x, parts, axis)


def _as_rows(x: tf.Tensor, outer: int = 0) -> tuple[tf.Tensor, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]]:
    """Returns `x` with its dimensions from `outer` to the last unknown one as padded rows, and what takes a result back.

    That is a function of (a result in rows, a tensor of the shape that it shall have).
    """
    unknown = [axis for axis, size in enumerate(x.shape) if size is None]
    if not unknown:
        return x, lambda moved, _: moved
    first, inner = list(x.shape[:outer]), list(x.shape[unknown[-1] + 1 :])
    # Not `tf.reduce_prod`: a GPU computes that, and the host would wait for it.
    length = functools.reduce(operator.mul, tf.unstack(tf.shape(x)[outer : unknown[-1] + 1]))
    rows = tf.ensure_shape(tf.reshape(x, [*first, length, *inner]), [*first, None, *inner])
    rows = with_zeros(rows, power_of_two(length) - length, outer)

    def restore(moved: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.reshape(moved[:length], tf.shape(like)), like.shape)

    return tf.ensure_shape(rows, [*first, None, *inner]), restore
