"""Large tensors in pieces, several of them on their way at once: TensorFlow's ring, called for each.

Between two processes gRPC carries pieces of some MiB more than twice as fast as tens of MiB. And while a piece is unpacked and
the next one is asked for, others keep the link busy: one at a time uses 70 to 75 % of a link of 1 Gbit/s, four at once 90 %
(benchmarks/transport.py, benchmarks/links.py, docs/notes/benchmarks.md).

Note: lanes. A rank has some chains of collectives, the lanes, and the pieces of a group's messages take them in turns:

    lane 0   A0  B1  C2            A of three pieces, B and C of four: a piece is sent when the fourth before it has arrived
    lane 1   A1  B2  C3
    lane 2   A2  B3
    lane 3   B0  C0
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.collectives.emission import Emission
from tfdist.collectives.plan import Ranks
from tfdist.collectives.transports.kernels import RING, Ring

LANES = 4


class Chunked(Ring):
    """Gives `RING` at most about `chunk_bytes` that a rank sends to a peer in a message, and some messages at once.

    Broadcasts, and what has a size that is known at run time only, stay whole, and come one after the other.
    """

    def __init__(self, chunk_bytes: int):
        self.chunk_bytes = chunk_bytes

    def all_reduce(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str, reduce_op: str) -> tf.Tensor:
        # Of a ring all-reduce one in N of the elements travels at once.
        pieces = self._pieces(program, x, [-1], ranks, label, hops=len(ranks))
        return _joined([RING.all_reduce(program, part, ranks, own, reduce_op) for own, part in pieces], 0, x.shape)

    def all_gather(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        pieces = self._pieces(program, x, [-1], ranks, label)
        moved = [RING.all_gather(program, part, ranks, own) for own, part in pieces]
        if len(moved) == 1:
            return moved[0]
        return _joined([tf.reshape(one, [len(ranks), -1]) for one in moved], 1, [len(ranks) * x.shape[0], *x.shape[1:]])

    def all_to_all(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        pieces = self._pieces(program, x, [len(ranks), -1], ranks, label)
        return _joined([RING.all_to_all(program, part, ranks, own) for own, part in pieces], 1, x.shape)

    def reduce_scatter(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str, dtype: tf.DType) -> tf.Tensor:
        pieces = self._pieces(program, x, [len(ranks), -1], ranks, label)
        return _joined([RING.reduce_scatter(program, part, ranks, own, dtype) for own, part in pieces], 0, x.shape[1:])

    def _pieces(
        self, program: Emission, x: tf.Tensor, shape: list[int], ranks: Ranks, label: str, hops: int = 1
    ) -> Iterator[tuple[str, tf.Tensor]]:
        """Yields labels and pieces of `x`, seen as of `shape`, cut along its last axis; of a piece one in `hops` travels at once.

        A piece's collective is emitted on its lane, before the next piece is asked for. Small tensors are not cut.
        """
        elements = x.shape[len(shape) - 1 :].num_elements()
        if elements is None:
            yield label, x
            return
        count = -(-elements * x.dtype.size // (self.chunk_bytes * hops))
        sizes = [len(range(number, elements, count)) for number in range(count)]
        parts = [x] if count == 1 else tf.split(tf.reshape(x, shape), sizes, len(shape) - 1)
        for number, part in enumerate(parts):
            with program.in_next_lane(ranks, LANES):
                yield label if count == 1 else f"{label}/{number}", part


def _joined(moved: list[tf.Tensor], axis: int, shape: Any) -> tf.Tensor:
    return moved[0] if len(moved) == 1 else tf.reshape(tf.concat(moved, axis), shape)
