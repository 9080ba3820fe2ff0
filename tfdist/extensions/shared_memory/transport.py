"""Collectives and messages of ranks that share memory, as operations: what `Exchange` and `Mailbox` do, called by TensorFlow.

They stand in the plan as any other. What TensorFlow calls is kept for ever, and so it holds numbers, not tensors: a tensor would
keep the whole graph of its trace.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.emission import Emission
from tfdist.collectives.plan import Ranks, TensorLike
from tfdist.collectives.transports.transport import MessageTransport, Transport, sum_dtype
from tfdist.extensions.shared_memory.exchange import Exchange
from tfdist.extensions.shared_memory.mailbox import Mailbox
from tfdist.extensions.shared_memory.python_calls import PythonCalls, call_python

_Method = Callable[..., None]


class SharedMemory(Transport):
    """The collectives of the one group whose members meet in `exchange`."""

    holds_thread = True

    def __init__(self, exchange: Exchange):
        self._exchange = exchange

    def all_reduce(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str, reduce_op: str) -> tf.Tensor:
        key = program.begin("all_reduce", x, ranks, label)
        dtype = sum_dtype(x.dtype).as_numpy_dtype
        move = functools.partial(self._exchange.all_reduce, reduce_op=reduce_op, dtype=dtype)
        return _move(program, key, move, [x], [_shape(x)], x.dtype)[0]

    def all_gather(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        key = program.begin("all_gather", x, ranks, label)
        rows = x.shape[0] * len(ranks) if x.shape[0] is not None else None
        shape = [rows, *x.shape[1:]] if x.shape.is_fully_defined() else tf.shape(x) * [len(ranks), *[1] * (x.shape.rank - 1)]
        [found] = _move(program, key, self._exchange.all_gather, [x], [shape], x.dtype)
        return tf.ensure_shape(found, [rows, *x.shape[1:]])

    def all_to_all(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        key = program.begin("all_to_all", x, ranks, label)
        return tf.ensure_shape(_move(program, key, self._exchange.all_to_all, [x], [_shape(x)], x.dtype)[0], x.shape)

    def reduce_scatter(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str, dtype: tf.DType) -> tf.Tensor:
        return self.reduce_scatter_parts(program, [x], ranks, label, dtype)[0]

    def broadcast(self, program: Emission, x: TensorLike, ranks: Ranks, source: int, op: str, label: str) -> tf.Tensor:
        key = program.begin(op, x, ranks, label, source)
        move = functools.partial(self._exchange.broadcast, source=ranks.index(source))
        if program.rank != source:
            return _move(program, key, move, [], [x.shape], x.dtype)[0]
        _move(program, key, move, [x], [], x.dtype)
        return tf.identity(x)

    def all_gather_parts(self, program: Emission, parts: Sequence[tf.Tensor], ranks: Ranks, label: str) -> list[tf.Tensor]:
        packed = tf.TensorSpec([sum(part.shape[0] for part in parts)], parts[0].dtype)
        key = program.begin("all_gather", packed, ranks, label)
        return _move(program, key, self._exchange.all_gather, parts, [[len(ranks) * x.shape[0]] for x in parts], packed.dtype)

    def reduce_scatter_parts(
        self, program: Emission, parts: Sequence[tf.Tensor], ranks: Ranks, label: str, dtype: tf.DType
    ) -> list[tf.Tensor]:
        packed = tf.TensorSpec([len(ranks), sum(part.shape[1] for part in parts)], parts[0].dtype) if parts[1:] else parts[0]
        key = program.begin("reduce_scatter", packed, ranks, label)
        shapes = [part.shape[1:] if part.shape.is_fully_defined() else tf.shape(part)[1:] for part in parts]
        moved = _move(program, key, self._exchange.reduce_scatter, parts, shapes, sum_dtype(parts[0].dtype))
        return [tf.cast(tf.ensure_shape(one, part.shape[1:]), dtype) for one, part in zip(moved, parts, strict=True)]


def _move(
    program: Emission, key: Any, move: _Method, parts: Sequence[tf.Tensor], shapes: Sequence[Any], dtype: tf.DType
) -> list[tf.Tensor]:
    """Runs a method of the `Exchange` on the chain; returns its results, of `shapes` and `dtype`."""
    results = [(shape, dtype) for shape in shapes]
    run = functools.partial(_run, move, len(parts))
    return call_python(program, run, [key, _turn(program.token()), *parts], results, program.token())


def _run(move: _Method, num_parts: int, key: Any, _: Any, *arrays: np.ndarray) -> None:
    move(arrays[:num_parts], arrays[num_parts:], key=int(key))


def _turn(token: tf.Tensor) -> tf.Tensor:
    """Returns an input for a call in whose turn `token` is read: it keeps the call from being folded."""
    return tf.raw_ops.ReadVariableOp(resource=token, dtype=tf.int64)


class MailboxMessages(MessageTransport):
    """Messages to and from the ranks that `mailbox` reaches.

    A rank receives one after the other, in the order of its trace, so that one thread waits at most.
    """

    holds_thread = True

    def __init__(self, mailbox: Mailbox):
        self.mailbox = mailbox

    def send(self, program: Emission, x: tf.Tensor, destination: int, label: str) -> None:
        key = program.begin_message(x, program.rank, destination, label)
        put = functools.partial(self.mailbox.send, destination, key)
        call_python(program, put, [x], [], program.communicator.message_token(program.rank))

    def receive(self, program: Emission, spec: tf.TensorSpec, rows: tf.Tensor, source: int, label: str) -> tf.Tensor:
        key, received = program.begin_message(spec, source, program.rank, label), program.part(PythonCalls).received
        counter = program.communicator.message_token(program.rank)
        has_unknown_rows = bool(spec.shape.rank) and spec.shape[0] is None
        shape = tf.stack([rows, *spec.shape[1:]]) if has_unknown_rows else spec.shape
        with tf.control_dependencies(received):
            take = functools.partial(self.mailbox.receive, source, key)
            [found] = call_python(program, lambda _, found: take(found), [_turn(counter)], [(shape, spec.dtype)], counter)
        received[:] = [found.op]
        return tf.ensure_shape(found, spec.shape)


def _shape(x: tf.Tensor) -> Any:
    return x.shape if x.shape.is_fully_defined() else tf.shape(x)
