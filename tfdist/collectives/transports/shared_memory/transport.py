"""Collectives and messages of ranks that share memory, as operations: what `Exchange` and `Mailbox` do, called by TensorFlow.

They stand in the plan as any other. What TensorFlow calls is kept for ever, and so it holds numbers, not tensors: a tensor would
keep the whole graph of its trace.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.plan import Ranks, TensorLike
from tfdist.collectives.program import RankProgram
from tfdist.collectives.transports.shared_memory.exchange import Exchange
from tfdist.collectives.transports.shared_memory.mailbox import Mailbox
from tfdist.collectives.transports.shared_memory.python_calls import call_python
from tfdist.collectives.transports.transport import MessageTransport, Transport, sum_dtype


class SharedMemory(Transport):
    """The collectives of the one group whose members meet in `exchange`.

    All collectives of a rank stand on one chain, so that nobody waits for what one of them holds up.
    """

    holds_thread = True

    def __init__(self, exchange: Exchange):
        self._exchange = exchange

    def all_reduce(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, reduce_op: str, label: str) -> tf.Tensor:
        dtype = sum_dtype(x.dtype).as_numpy_dtype
        move = functools.partial(self._exchange.all_reduce, reduce_op=reduce_op, dtype=dtype)
        return self._move(program, move, [x], [_shape(x)], x.dtype, x, ranks, "all_reduce", label)[0]

    def all_gather(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        rows = x.shape[0] * len(ranks) if x.shape[0] is not None else None
        shape = [rows, *x.shape[1:]] if x.shape.is_fully_defined() else tf.shape(x) * [len(ranks), *[1] * (x.shape.rank - 1)]
        [found] = self._move(program, self._exchange.all_gather, [x], [shape], x.dtype, x, ranks, "all_gather", label)
        return tf.ensure_shape(found, [rows, *x.shape[1:]])

    def all_to_all(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        [found] = self._move(program, self._exchange.all_to_all, [x], [_shape(x)], x.dtype, x, ranks, "all_to_all", label)
        return tf.ensure_shape(found, x.shape)

    def reduce_scatter(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str, dtype: tf.DType) -> tf.Tensor:
        return self._reduce_scatter(program, [x], x, ranks, label, dtype)[0]

    def broadcast(self, program: RankProgram, x: TensorLike, ranks: Ranks, source: int, op: str, label: str) -> tf.Tensor:
        move = functools.partial(self._exchange.broadcast, source=ranks.index(source))
        if program.rank == source:
            self._move(program, move, [x], [], x.dtype, x, ranks, op, label, source)
            return tf.identity(x)
        return self._move(program, move, [], [x.shape], x.dtype, x, ranks, op, label, source)[0]

    def all_gather_parts(self, program: RankProgram, parts: Sequence[tf.Tensor], ranks: Ranks, label: str) -> list[tf.Tensor]:
        packed = tf.TensorSpec([sum(part.shape[0] for part in parts)], parts[0].dtype)
        shapes = [[len(ranks) * part.shape[0]] for part in parts]
        return self._move(program, self._exchange.all_gather, parts, shapes, packed.dtype, packed, ranks, "all_gather", label)

    def reduce_scatter_parts(
        self, program: RankProgram, parts: Sequence[tf.Tensor], ranks: Ranks, label: str, dtype: tf.DType
    ) -> list[tf.Tensor]:
        packed = tf.TensorSpec([len(ranks), sum(part.shape[1] for part in parts)], parts[0].dtype)
        return self._reduce_scatter(program, parts, packed, ranks, label, dtype)

    def _reduce_scatter(
        self,
        program: RankProgram,
        parts: Sequence[tf.Tensor],
        packed: tf.Tensor | tf.TensorSpec,
        ranks: Ranks,
        label: str,
        dtype: tf.DType,
    ) -> list[tf.Tensor]:
        shapes = [part.shape[1:] if part.shape.is_fully_defined() else tf.shape(part)[1:] for part in parts]
        wide = sum_dtype(packed.dtype)
        moved = self._move(program, self._exchange.reduce_scatter, parts, shapes, wide, packed, ranks, "reduce_scatter", label)
        return [tf.cast(tf.ensure_shape(one, part.shape[1:]), dtype) for one, part in zip(moved, parts, strict=True)]

    def _move(
        self,
        program: RankProgram,
        move: Callable[..., None],
        parts: Sequence[tf.Tensor],
        shapes: Sequence[Any],
        dtype: tf.DType,
        packed: tf.Tensor | tf.TensorSpec,
        ranks: Ranks,
        op: str,
        label: str,
        source: int | None = None,
    ) -> list[tf.Tensor]:
        """Runs `move(arrays, out, key=...)`, a method of the `Exchange`, on the chain.

        Args:
            program: of the rank.
            move: the method.
            parts: this rank's tensors.
            shapes, dtype: of the results.
            packed: all parts as one, for the plan.
            ranks, op, label, source: for the plan.
        """
        key = program.begin(op, packed, ranks, label, source)
        # That it reads its turn keeps it from being folded.
        turn = tf.raw_ops.ReadVariableOp(resource=program.token(), dtype=tf.int64)
        results = [(shape, dtype) for shape in shapes]
        return call_python(program, _Move(move, len(parts)), [key, turn, *parts], results, program.token())


@dataclasses.dataclass(frozen=True)
class _Move:
    """What the operation of one collective calls."""

    move: Callable[..., None]
    num_parts: int

    def __call__(self, key: Any, _: Any, *arrays: np.ndarray) -> None:
        self.move(arrays[: self.num_parts], arrays[self.num_parts :], key=int(key))


class MailboxMessages(MessageTransport):
    """Messages to and from the ranks that `mailbox` reaches.

    A rank receives one after the other, in the order of its trace, so that one thread waits at most.
    """

    holds_thread = True

    def __init__(self, mailbox: Mailbox):
        self.mailbox = mailbox

    def send(self, program: RankProgram, x: tf.Tensor, destination: int, label: str) -> None:
        key = program.begin_message(tf.TensorSpec(x.shape, x.dtype), program.rank, destination, label)
        put = functools.partial(self.mailbox.send, destination, key)
        call_python(program, put, [x], [], program.communicator.message_token(program.rank))

    def receive(self, program: RankProgram, spec: tf.TensorSpec, rows: tf.Tensor, source: int, label: str) -> tf.Tensor:
        key, received = program.begin_message(spec, source, program.rank, label), program.attachment(_Received)
        counter = program.communicator.message_token(program.rank)
        has_unknown_rows = bool(spec.shape.rank) and spec.shape[0] is None
        shape = tf.stack([rows, *spec.shape[1:]]) if has_unknown_rows else spec.shape
        with tf.control_dependencies(received.last):
            # That it reads its turn keeps it from being folded.
            turn = tf.raw_ops.ReadVariableOp(resource=counter, dtype=tf.int64)
            [found] = call_python(program, _Take(self.mailbox, source, key), [turn], [(shape, spec.dtype)], counter)
        received.last = [] if program.is_eager else [found.op]
        return tf.ensure_shape(found, spec.shape)


@dataclasses.dataclass(frozen=True)
class _Take:
    """What the operation that receives a message calls."""

    mailbox: Mailbox
    source: int
    key: int

    def __call__(self, _: Any, found: np.ndarray) -> None:
        self.mailbox.receive(self.source, self.key, found)


class _Received:
    """The operation that has received a rank's last message in one trace; an attachment of its program."""

    def __init__(self, program: RankProgram):
        self.last: list[tf.Operation] = []


def _shape(x: tf.Tensor) -> Any:
    return x.shape if x.shape.is_fully_defined() else tf.shape(x)
