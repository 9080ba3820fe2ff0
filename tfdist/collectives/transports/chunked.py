"""Large tensors in pieces, several of them on their way at once: a transport around another.

Between two processes gRPC carries pieces of some MiB more than twice as fast as tens of MiB. And while a piece is unpacked and
the next one is asked for, others keep the link busy: one at a time uses 70 to 75 % of a link of 1 Gbit/s, four at once 90 %
(benchmarks/transport.py, benchmarks/links.py, docs/notes/benchmarks.md).

Note: lanes. A rank has some chains of collectives, the lanes, and the pieces of a group's messages take them in turns:

    lane 0   A0  B1  C2            A of three pieces, B and C of four: a piece is sent when the fourth before it has arrived
    lane 1   A1  B2  C3
    lane 2   A2  B3
    lane 3   B0  C0
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdist.collectives.communicator import Communicator
from tfdist.collectives.plan import Ranks, TensorLike
from tfdist.collectives.program import RankProgram
from tfdist.collectives.transports.kernels import Kernels
from tfdist.collectives.transports.transport import Transport

LANES = 4


class Chunked(Transport):
    """Gives `inner` at most about `chunk_bytes` that a rank sends to a peer in a message, and some messages at once.

    Broadcasts, and what has a size that is known at run time only, stay whole, and come one after the other.
    """

    def __init__(self, inner: Kernels, chunk_bytes: int):
        self.inner = inner
        self.chunk_bytes = chunk_bytes
        self.hint = inner.hint
        self.messages = inner.messages

    def exchanges(self, communicator: Communicator, ranks: Ranks) -> bool:
        return self.inner.exchanges(communicator, ranks)

    def all_reduce(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, reduce_op: str, label: str) -> tf.Tensor:
        # Of a ring all-reduce one in N of the elements travels at once.
        pieces = self._pieces(x, x.shape.num_elements(), len(ranks))
        with_label = zip(_in_lanes(program, ranks, pieces, label), _split(x, [-1], pieces, 0), strict=True)
        moved = [self.inner.all_reduce(program, part, ranks, reduce_op, own) for own, part in with_label]
        return moved[0] if len(moved) == 1 else tf.reshape(tf.concat(moved, 0), x.shape)

    def all_gather(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        pieces = self._pieces(x, x.shape.num_elements())
        with_label = zip(_in_lanes(program, ranks, pieces, label), _split(x, [-1], pieces, 0), strict=True)
        moved = [self.inner.all_gather(program, part, ranks, own) for own, part in with_label]
        if len(moved) == 1:
            return moved[0]
        rows = [tf.reshape(one, [len(ranks), -1]) for one in moved]
        return tf.reshape(tf.concat(rows, 1), [len(ranks) * x.shape[0], *x.shape[1:]])

    def all_to_all(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        pieces = self._pieces(x, x.shape[1:].num_elements())
        with_label = zip(_in_lanes(program, ranks, pieces, label), _split(x, [len(ranks), -1], pieces, 1), strict=True)
        moved = [self.inner.all_to_all(program, part, ranks, own) for own, part in with_label]
        return moved[0] if len(moved) == 1 else tf.reshape(tf.concat(moved, 1), x.shape)

    def reduce_scatter(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str, dtype: tf.DType) -> tf.Tensor:
        pieces = self._pieces(x, x.shape[1:].num_elements())
        with_label = zip(_in_lanes(program, ranks, pieces, label), _split(x, [len(ranks), -1], pieces, 1), strict=True)
        moved = [self.inner.reduce_scatter(program, part, ranks, own, dtype) for own, part in with_label]
        return moved[0] if len(moved) == 1 else tf.reshape(tf.concat(moved, 0), x.shape[1:])

    def broadcast(self, program: RankProgram, x: TensorLike, ranks: Ranks, source: int, op: str, label: str) -> tf.Tensor:
        return self.inner.broadcast(program, x, ranks, source, op, label)

    def _pieces(self, x: tf.Tensor, elements: int | None, hops: int = 1) -> list[int]:
        """Returns how many elements go in each message of a tensor of `elements`, of which one in `hops` travels at once."""
        if elements is None:
            return [0]
        count = -(-elements * x.dtype.size // (self.chunk_bytes * hops))
        return [len(range(number, elements, count)) for number in range(count)]


def _split(x: tf.Tensor, shape: list[int], pieces: list[int], axis: int) -> list[tf.Tensor]:
    """Returns `x`, seen as of `shape`, cut along `axis`; one that is not cut stays as it is."""
    return [x] if len(pieces) == 1 else tf.split(tf.reshape(x, shape), pieces, axis)


def _in_lanes(program: RankProgram, ranks: Ranks, pieces: list[int], label: str) -> Iterator[str]:
    """Yields the label of each of a message's pieces: what is emitted before the next is asked for stands on the piece's lane."""
    for number in range(len(pieces)):
        with program.in_next_lane(ranks, LANES) if pieces != [0] else contextlib.nullcontext():
            yield label if len(pieces) == 1 else f"{label}/{number}"
