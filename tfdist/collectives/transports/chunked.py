"""Large tensors in pieces: a transport around another.

Between two processes gRPC carries pieces of some MiB more than twice as fast as tens of MiB; between four, as fast or somewhat
faster (benchmarks/transport.py, docs/notes/benchmarks.md).
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives.communicator import Communicator
from tfdist.collectives.plan import Ranks, TensorLike
from tfdist.collectives.program import RankProgram
from tfdist.collectives.transports.kernels import Kernels
from tfdist.collectives.transports.transport import Transport


class Chunked(Transport):
    """Gives `inner` at most about `chunk_bytes` that a rank sends to a peer at once; all-to-all and broadcasts as they come."""

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
        if len(pieces) == 1:
            return self.inner.all_reduce(program, x, ranks, reduce_op, label)
        parts = tf.split(tf.reshape(x, [-1]), pieces)
        moved = [self.inner.all_reduce(program, part, ranks, reduce_op, f"{label}/{number}") for number, part in enumerate(parts)]
        return tf.reshape(tf.concat(moved, 0), x.shape)

    def all_gather(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        pieces = self._pieces(x, x.shape.num_elements())
        if len(pieces) == 1:
            return self.inner.all_gather(program, x, ranks, label)
        parts = tf.split(tf.reshape(x, [-1]), pieces)
        moved = [
            tf.reshape(self.inner.all_gather(program, part, ranks, f"{label}/{number}"), [len(ranks), -1])
            for number, part in enumerate(parts)
        ]
        return tf.reshape(tf.concat(moved, 1), [len(ranks) * x.shape[0], *x.shape[1:]])

    def reduce_scatter(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str, dtype: tf.DType) -> tf.Tensor:
        pieces = self._pieces(x, x.shape[1:].num_elements())
        if len(pieces) == 1:
            return self.inner.reduce_scatter(program, x, ranks, label, dtype)
        parts = tf.split(tf.reshape(x, [len(ranks), -1]), pieces, 1)
        moved = [self.inner.reduce_scatter(program, part, ranks, f"{label}/{number}", dtype) for number, part in enumerate(parts)]
        return tf.reshape(tf.concat(moved, 0), x.shape[1:])

    def all_to_all(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        return self.inner.all_to_all(program, x, ranks, label)

    def broadcast(self, program: RankProgram, x: TensorLike, ranks: Ranks, source: int, op: str, label: str) -> tf.Tensor:
        return self.inner.broadcast(program, x, ranks, source, op, label)

    def _pieces(self, x: tf.Tensor, elements: int | None, hops: int = 1) -> list[int]:
        """Returns how many elements go in each message of a tensor of `elements`, of which one in `hops` travels at once."""
        if elements is None:
            return [0]
        count = -(-elements * x.dtype.size // (self.chunk_bytes * hops))
        return [len(range(number, elements, count)) for number in range(count)]
