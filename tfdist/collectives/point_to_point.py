"""Send and receive between two ranks of a group.

    send      forward: x leaves for `destination`; backward: its gradient is received from there
    receive   forward: x arrives from `source`; backward: its gradient is sent there

TensorFlow has no other point-to-point transport between processes than a broadcast in a group of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import wire
from tfdist.collectives.program import RankProgram
from tfdist.collectives.where import current_program
from tfdist.custom_gradients import custom_gradient


def send(x: tf.Tensor, destination: int, mesh_axis: str = "data", *, label: str = "send") -> tf.Tensor:
    """Sends `x` to the group's member `destination`, which calls `receive`.

    Args:
        x: tensor of static shape.
        destination: index within the group of `mesh_axis`; not this rank.
        mesh_axis: "data", "pipe" or "tensor".
        label: what it is for, shown in the plan; the receiver must give the same.

    Returns:
        A scalar zero of `x`'s dtype, the receipt. Add it to this rank's loss: it carries the way back, on which the gradient
        of `x` is received. Without that, `x` has no gradient and the receiver's gradient must not be asked for either.
        Whether a scaled loss scales the receipt too makes no difference.

    Raises:
        ValueError: `destination` outside the group or this rank itself, or a shape that is not static.
        RuntimeError: called outside `strategy.run`, or the receiver expects something else.
    """
    program, peer, pair = _pair("send", "destination", destination, mesh_axis)
    x = tf.convert_to_tensor(x)
    wire.check_dtype("send", x)
    if not x.shape.is_fully_defined():
        raise ValueError(errors.message("`send` needs a static shape.", shape=x.shape, fix="Use `tf.ensure_shape`."))

    @custom_gradient
    def leave(x):
        def gradient(_):
            # Not times the receipt's gradient: what arrives is the whole gradient of the receiver's loss, scaled as that is.
            return wire.broadcast_receive(program, x.shape, x.dtype, pair, peer, "send", f"{label}/gradient")

        sent = wire.broadcast_send(program, x, pair, "send", label)
        with tf.control_dependencies([sent]):
            return tf.zeros([], x.dtype), gradient

    return leave(x)


def receive(
    shape: Sequence[int],
    dtype: tf.DType,
    source: int,
    mesh_axis: str = "data",
    *,
    anchor: tf.Tensor | None = None,
    label: str = "send",
) -> tf.Tensor:
    """Receives what the group's member `source` sends with `send`.

    Args:
        shape, dtype: those of the sender's tensor.
        source: index within the group of `mesh_axis`; not this rank.
        mesh_axis: "data", "pipe" or "tensor".
        anchor: a tensor that the gradient tape watches, such as a constant given to `tape.watch`. Its gradient is zero; asking
            for it makes the tape send the gradient of the received tensor back to `source`. None: no way back.
        label: what it is for, shown in the plan; the same as the sender's.

    Returns:
        The tensor that was sent.

    Raises:
        ValueError: `source` outside the group or this rank itself, or a shape that is not static.
        RuntimeError: called outside `strategy.run`, or the sender sends something else.
    """
    program, peer, pair = _pair("receive", "source", source, mesh_axis)
    shape, dtype = tf.TensorShape(shape), tf.as_dtype(dtype)
    if not shape.is_fully_defined():
        raise ValueError(errors.message("`receive` needs a static `shape`.", shape=shape))
    wire.check_dtype("receive", tf.TensorSpec(shape, dtype))

    @custom_gradient
    def arrive(anchor):
        def gradient(upstream):
            sent = wire.broadcast_send(program, upstream, pair, "send", f"{label}/gradient")
            with tf.control_dependencies([sent]):
                return tf.zeros_like(anchor)

        return wire.broadcast_receive(program, shape, dtype, pair, peer, "send", label), gradient

    return arrive(tf.zeros([], tf.float32) if anchor is None else anchor)


def _pair(op: str, argument: str, index: int, mesh_axis: str) -> tuple[RankProgram, int, tuple[int, int]]:
    program = current_program(f"`{op}`")
    ranks = program.group_ranks(mesh_axis)
    if not 0 <= index < len(ranks) or ranks[index] == program.rank:
        raise ValueError(
            errors.message(
                f"`{argument}` must be another member of the group: an index in [0, {len(ranks)}) other than this rank's, "
                f"{ranks.index(program.rank)}.",
                **{argument: index},
            )
        )
    peer = ranks[index]
    return program, peer, tuple(sorted((program.rank, peer)))
