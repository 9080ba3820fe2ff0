"""Collectives of ranks that meet in memory (`shared_memory`), as operations. They stand in the plan as any other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives.program import RankProgram
from tfdist.collectives.python_calls import call_python


def all_reduce(
    program: RankProgram, x: tf.Tensor, ranks: tuple[int, ...], reduce_op: str, label: str, *, summed_in: tf.DType
) -> tf.Tensor:
    """`wire.all_reduce`; sums are taken in the dtype `summed_in`."""
    exchange = program.communicator.exchanges[ranks]
    move = functools.partial(exchange.all_reduce, reduce_op=reduce_op, dtype=summed_in.as_numpy_dtype)
    return _move(program, move, [x], x, ranks, "all_reduce", label, [_shape(x)], x.dtype)[0]


def all_gather(program: RankProgram, x: tf.Tensor, ranks: tuple[int, ...], label: str) -> tf.Tensor:
    """`wire.all_gather`."""
    move = program.communicator.exchanges[ranks].all_gather
    rows = x.shape[0] * len(ranks) if x.shape[0] is not None else None
    shape = [rows, *x.shape[1:]] if x.shape.is_fully_defined() else tf.shape(x) * [len(ranks), *[1] * (x.shape.rank - 1)]
    [gathered] = _move(program, move, [x], x, ranks, "all_gather", label, [shape], x.dtype)
    return tf.ensure_shape(gathered, [rows, *x.shape[1:]])


def all_to_all(program: RankProgram, x: tf.Tensor, ranks: tuple[int, ...], label: str) -> tf.Tensor:
    """`wire.all_to_all`."""
    move = program.communicator.exchanges[ranks].all_to_all
    return tf.ensure_shape(_move(program, move, [x], x, ranks, "all_to_all", label, [_shape(x)], x.dtype)[0], x.shape)


def broadcast_send(program: RankProgram, x: tf.Tensor, ranks: tuple[int, ...], op: str, label: str) -> tf.Tensor:
    """`wire.broadcast_send`."""
    move = functools.partial(program.communicator.exchanges[ranks].broadcast, source=ranks.index(program.rank))
    _move(program, move, [x], x, ranks, op, label, [], x.dtype, source=program.rank)
    return tf.identity(x)


def broadcast_receive(
    program: RankProgram, like: tf.TensorSpec, ranks: tuple[int, ...], source: int, op: str, label: str
) -> tf.Tensor:
    """`wire.broadcast_receive`."""
    move = functools.partial(program.communicator.exchanges[ranks].broadcast, source=ranks.index(source))
    return _move(program, move, [], like, ranks, op, label, [like.shape], like.dtype, source=source)[0]


def all_gather_parts(
    program: RankProgram, parts: Sequence[tf.Tensor], packed: tf.TensorSpec, ranks: tuple[int, ...], label: str
) -> list[tf.Tensor]:
    """`wire.all_gather_parts`; together they are a message of `packed`."""
    move = program.communicator.exchanges[ranks].all_gather
    shapes = [[len(ranks) * part.shape[0]] for part in parts]
    return _move(program, move, parts, packed, ranks, "all_gather", label, shapes, packed.dtype)


def reduce_scatter_parts(
    program: RankProgram,
    parts: Sequence[tf.Tensor],
    packed: tf.Tensor | tf.TensorSpec,
    ranks: tuple[int, ...],
    label: str,
    *,
    summed_in: tf.DType,
) -> list[tf.Tensor]:
    """`wire.reduce_scatter_parts`, in the dtype `summed_in`; together the parts are a message of `packed`."""
    move = program.communicator.exchanges[ranks].reduce_scatter
    shapes = [part.shape[1:] if part.shape.is_fully_defined() else tf.shape(part)[1:] for part in parts]
    moved = _move(program, move, parts, packed, ranks, "reduce_scatter", label, shapes, summed_in)
    return [tf.ensure_shape(one, part.shape[1:]) for one, part in zip(moved, parts, strict=True)]


def _shape(x: tf.Tensor) -> Any:
    return x.shape if x.shape.is_fully_defined() else tf.shape(x)


def _move(
    program: RankProgram,
    move: Callable[..., None],
    parts: Sequence[tf.Tensor],
    packed: tf.Tensor | tf.TensorSpec,
    ranks: tuple[int, ...],
    op: str,
    label: str,
    shapes: Sequence[Any],
    dtype: tf.DType,
    source: int | None = None,
) -> list[tf.Tensor]:
    """Runs `move(arrays, out, key=...)`, a method of the group's `Exchange`, on the chain.

    Returns its results, of `shapes` and `dtype`.
    """
    with tf.device(program.device):
        key = program.begin(op, packed, ranks, label, source)["instance_key"]
        # That it reads its turn keeps it from being folded.
        turn = tf.raw_ops.ReadVariableOp(resource=program.token(), dtype=tf.int64)

    results = [(shape, dtype) for shape in shapes]
    return call_python(program, _Turns(move, len(parts)), [key, turn, *parts], results, program.token())


@dataclasses.dataclass(frozen=True)
class _Turns:
    """What one such operation calls. It is kept for ever, and so holds no tensor, which would keep its graph."""

    move: Callable[..., None]
    num_parts: int

    def __call__(self, key: Any, _: Any, *arrays: np.ndarray) -> None:
        self.move(arrays[: self.num_parts], arrays[self.num_parts :], key=int(key))
