"""Between two ranks: `send` and `receive`, with gradients; and messages, of which no two wait for each other.

    send      forward: x leaves for `destination`; backward: its gradient is received from there
    receive   forward: x arrives from `source`; backward: its gradient is sent there

Those two stand in the order of the rank's collectives, as a broadcast in a group of two. Messages (`send_message`,
`receive_message`) have no order with the collectives on the rank's chain, nor among each other: sender and receiver find each
other by a label. They have no gradient. How a message travels is its pair's transport: in one process along an edge of the graph.
On GPUs messages between processes do have an order, that of `send` and `receive` (`is_in_order`).
"""

from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import group_ops
from tfdist.collectives.program import RankProgram
from tfdist.collectives.transports.graph_edges import GraphEdges
from tfdist.collectives.transports.transport import MessageTransport
from tfdist.collectives.where import current_program
from tfdist.custom_gradients import with_adjoint


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
    group_ops.check_dtype("send", x)
    group_ops.check_static("send", x)

    def leave(x: tf.Tensor) -> tf.Tensor:
        sent = group_ops.broadcast(program, x, x.shape, pair, program.rank, label, op="send")
        with tf.control_dependencies([sent]):
            return tf.zeros([], x.dtype)

    def gradient(_: tf.Tensor) -> tf.Tensor:
        # Not times the receipt's gradient: what arrives is the whole gradient of the receiver's loss, scaled as that is.
        return group_ops.broadcast(program, x, x.shape, pair, peer, f"{label}/gradient", op="send")

    return with_adjoint(leave, gradient, x)


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
    spec = tf.TensorSpec(shape, dtype)
    if not spec.shape.is_fully_defined():
        raise errors.value_error("`receive` needs a static `shape`.", shape=spec.shape)
    group_ops.check_dtype("receive", spec)

    anchor = tf.zeros([], tf.float32) if anchor is None else anchor

    def arrive(_: tf.Tensor) -> tf.Tensor:
        return group_ops.broadcast(program, spec, spec.shape, pair, peer, label, op="send")

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        sent = group_ops.broadcast(program, upstream, upstream.shape, pair, program.rank, f"{label}/gradient", op="send")
        with tf.control_dependencies([sent]):
            return tf.zeros_like(anchor)

    return with_adjoint(arrive, gradient, anchor)


def _pair(op: str, argument: str, index: int, mesh_axis: str) -> tuple[RankProgram, int, tuple[int, int]]:
    program = current_program(f"`{op}`")
    ranks = program.group_ranks(mesh_axis)
    program.watched_groups.add(ranks)
    received: dict[str, Any] = {argument: index}
    if not 0 <= index < len(ranks) or ranks[index] == program.rank:
        raise errors.value_error(
            f"`{argument}` must be another member of the group: an index in [0, {len(ranks)}) other than this rank's, "
            f"{ranks.index(program.rank)}.",
            **received,
        )
    peer = ranks[index]
    return program, peer, (min(program.rank, peer), max(program.rank, peer))


# Messages


def send_message(program: RankProgram, x: tf.Tensor, destination: int, label: str) -> None:
    """Sends `x` to rank `destination`, which calls `receive_message` with the same `label`, in this trace or its worker's.

    Only the first dimension of `x` may be unknown. No two messages of a step between two ranks have the same label.
    """
    _check_sizes(program, x.shape, destination, label)
    with tf.device(program.device):
        message_transport(program, destination).send(program, x, destination, label)


def receive_message(program: RankProgram, spec: tf.TensorSpec, rows: tf.Tensor, source: int, label: str) -> tf.Tensor:
    """Returns what rank `source` sends with the same `label`, a tensor of `spec`.

    Only the first dimension of `spec` may be unknown: then it is `rows`, an int32 scalar.
    """
    _check_sizes(program, spec.shape, source, label)
    with tf.device(program.device):
        return message_transport(program, source).receive(program, spec, rows, source, label)


def message_transport(program: RankProgram, other: int) -> MessageTransport:
    """Returns how messages to and from rank `other` travel."""
    communicator = program.communicator
    if other in communicator.local_ranks:
        return program.plan.shared(GraphEdges)
    return cast(MessageTransport, communicator.message_transports.get(other, communicator.transport.messages))


def _check_sizes(program: RankProgram, shape: tf.TensorShape, other: int, label: str) -> None:
    """Raises NotImplementedError for a message to another process of which more than the rows is unknown."""
    if other not in program.communicator.local_ranks and shape.rank and None in shape[1:].as_list():
        raise errors.not_implemented(
            f"What passes between two workers must be of known size but for its rows: {label!r} is not.",
            shape=shape,
            fix="Give the model's inputs a fixed size, such as `keras.Input((sequence_length,))`.",
        )
