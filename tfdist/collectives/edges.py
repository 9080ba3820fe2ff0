"""One-way connections between two ranks of a pipeline: what one rank sends, the other receives under the same label.

Between two devices of this process it is a plain edge of the graph, which costs nothing between logical CPUs and one copy between
GPUs. Ranks are traced one after the other, and each may need what a later one makes: such a receiver gets a stand-in, and is
connected to the real tensor when that is made. Between processes of one machine it goes through a `Mailbox`; between others it is
a broadcast in a group of two, one group for each direction. Messages have no order with the collectives on the rank's chain, nor
among each other, but that those which hold a thread are received one after the other.

Nothing here has a gradient: a pipeline sends its gradients itself.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import errors
from tfdist.collectives import wire
from tfdist.collectives.program import RankProgram, log2_ceiling
from tfdist.collectives.python_calls import call_python


@dataclasses.dataclass(frozen=True)
class _Message:
    source: int
    destination: int
    label: str


class _LocalEdges:
    """The messages between ranks of this process in one trace; an attachment of its plan."""

    def __init__(self) -> None:
        self._sent: dict[_Message, tf.Tensor] = {}
        self._awaited: dict[_Message, tf.Tensor] = {}

    def send(self, message: _Message, x: tf.Tensor) -> None:
        self._sent[message] = x
        if message in self._awaited:
            self._connect(self._awaited.pop(message), x, message)

    def receive(self, message: _Message, spec: tf.TensorSpec) -> tf.Tensor:
        if message in self._sent:
            received = tf.identity(self._sent[message])
            received.set_shape(spec.shape)
            return received
        static = [1 if size is None else size for size in spec.shape]
        stand_in = tf.compat.v1.placeholder_with_default(tf.zeros(static, spec.dtype), spec.shape)
        self._awaited[message] = tf.identity(stand_in)
        return self._awaited[message]

    def check_complete(self) -> None:
        """Raises RuntimeError when a rank waits for what no rank sends."""
        if self._awaited:
            message = next(iter(self._awaited))
            raise RuntimeError(
                errors.message(
                    f"Rank {message.destination} of a pipeline waits for {message.label!r}, which rank {message.source} never "
                    "sends."
                )
            )

    @staticmethod
    def _connect(stand_in: tf.Tensor, x: tf.Tensor, message: _Message) -> None:
        if stand_in.dtype != x.dtype or not stand_in.shape.is_compatible_with(x.shape):
            raise RuntimeError(
                errors.message(
                    f"Rank {message.destination} of a pipeline expects {message.label!r} to be {stand_in.dtype.name}"
                    f"{stand_in.shape}, but rank {message.source} sends {x.dtype.name}{x.shape}."
                )
            )
        stand_in.op._update_input(0, x)


def send(program: RankProgram, x: tf.Tensor, destination: int, label: str) -> None:
    """Sends `x` to rank `destination`, which calls `receive` with the same `label`, in this trace or in that of its worker.

    Args:
        program: the sender's.
        x: only its first dimension may be unknown.
        destination: another rank.
        label: no two messages of a step between two ranks have the same.
    """
    if destination in program.communicator.local_ranks:
        program.plan.attachment(_LocalEdges).send(_Message(program.rank, destination, label), x)
        return
    _check_sizes(x.shape, label)
    if holds_thread(program, destination):
        _put(program, x, destination, label)
        return
    rows = tf.shape(x)[0] if _has_unknown_rows(x.shape) else None
    wire.edge_send(program, _carried(_padded(x, rows)), destination, label)


def receive(program: RankProgram, spec: tf.TensorSpec, rows: tf.Tensor, source: int, label: str) -> tf.Tensor:
    """Returns what rank `source` sends with the same `label`, a tensor of `spec`.

    Args:
        program: the receiver's.
        spec: shape and dtype; only the first dimension may be unknown.
        rows: what the first dimension is, an int32 scalar. Only used where it is unknown.
        source: another rank.
        label: that of `send`.
    """
    with tf.device(program.device):
        if source in program.communicator.local_ranks:
            return program.plan.attachment(_LocalEdges).receive(_Message(source, program.rank, label), spec)
        _check_sizes(spec.shape, label)
        if holds_thread(program, source):
            return _take(program, spec, rows, source, label)
        dtype = wire.WIDENED.get(spec.dtype, spec.dtype)
        if not _has_unknown_rows(spec.shape):
            shape = tf.constant(spec.shape.as_list(), tf.int32)
            return tf.cast(wire.edge_receive(program, tf.TensorSpec(spec.shape, dtype), shape, source, label), spec.dtype)
        padded, inner = tf.bitwise.left_shift(1, log2_ceiling(rows)), spec.shape[1:].as_list()
        shape = tf.concat([[padded], tf.constant(inner, tf.int32)], 0)
        received = wire.edge_receive(program, tf.TensorSpec([None, *inner], dtype), shape, source, label)
        return tf.cast(received[:rows], spec.dtype)


def holds_thread(program: RankProgram, source: int) -> bool:
    """Whether to receive from `source` holds a thread that runs operations until the message is there."""
    mailbox = program.communicator.mailbox
    return mailbox is not None and source in mailbox.peers


def _put(program: RankProgram, x: tf.Tensor, destination: int, label: str) -> None:
    """Sends `x` through the mailbox."""
    key = program.begin_mail(tf.TensorSpec(x.shape, x.dtype), program.rank, destination, label)
    send = functools.partial(program.communicator.mailbox.send, destination, key)
    call_python(program, send, [x], [], program.communicator.edge_token(program.rank))


def _take(program: RankProgram, spec: tf.TensorSpec, rows: tf.Tensor, source: int, label: str) -> tf.Tensor:
    """Receives through the mailbox: messages of a rank one after the other, so that one thread waits at most."""
    mailbox, taken = program.communicator.mailbox, program.attachment(_Taken)
    key = program.begin_mail(spec, source, program.rank, label)
    counter = program.communicator.edge_token(program.rank)
    shape = tf.stack([rows, *spec.shape[1:]]) if _has_unknown_rows(spec.shape) else spec.shape

    def run(_: Any, found: np.ndarray) -> None:
        mailbox.receive(source, key, found)

    with tf.control_dependencies(taken.last):
        # That it reads its turn keeps it from being folded.
        turn = tf.raw_ops.ReadVariableOp(resource=counter, dtype=tf.int64)
        [received] = call_python(program, run, [turn], [(shape, spec.dtype)], counter)
    taken.last = [] if program.is_eager else [received.op]
    return tf.ensure_shape(received, spec.shape)


class _Taken:
    """The operation that has received a rank's last message in one trace; an attachment of its program."""

    def __init__(self, program: RankProgram):
        self.last: list[tf.Operation] = []


def _has_unknown_rows(shape: tf.TensorShape) -> bool:
    return bool(shape.rank) and shape[0] is None


def _check_sizes(shape: tf.TensorShape, label: str) -> None:
    """Raises NotImplementedError for a message between processes of which more than the rows is unknown."""
    if shape.rank and None in shape[1:].as_list():
        raise NotImplementedError(
            errors.message(
                f"What passes between stages on different workers must be of known size but for its rows: {label!r} is not.",
                shape=shape,
                fix="Give the model's inputs a fixed size, such as `keras.Input((sequence_length,))`.",
            )
        )


def _padded(x: tf.Tensor, rows: tf.Tensor | None) -> tf.Tensor:
    """Returns `x` with its rows padded to a power of two: a message's key is bound to one shape for the process's life."""
    if rows is None:
        return x
    padding = tf.bitwise.left_shift(1, log2_ceiling(rows)) - rows
    return tf.ensure_shape(tf.pad(x, [[0, padding]] + [[0, 0]] * (x.shape.rank - 1)), x.shape)


def _carried(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, wire.WIDENED.get(x.dtype, x.dtype))
