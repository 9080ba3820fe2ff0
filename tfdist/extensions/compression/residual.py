"""Where a rank keeps what its compressed gradients of a variable have lost: see `error_feedback`.

    stage 0 to 3             of the whole local gradient, on every rank               b(n) bytes of n numbers
    sharding groups          of its shard, which is what groups send each other       b(L)

The ranks' residuals enter the training only by their sum. So that is what is saved, one array of the variable's shape, and what
another number of ranks goes on from: each of N ranks takes an N-th of it. A run that saves does the same, so that it goes on as
the run does that is begun again from the file.
"""

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives import RankProgram, cross_replica_of, group_ops
from tfdist.mesh import Coordinate
from tfdist.sharding import packing
from tfdist.sharding.assembly import gather_whole
from tfdist.sharding.compression import Compressor
from tfdist.sharding.config import MeshConfig
from tfdist.sharding.placements import Replicate, Shard
from tfdist.sharding.separate_thread import in_separate_thread


class Residual(tf.train.experimental.PythonState):
    """The loss of each rank's messages of gradients of `variable`, of TensorFlow; zero at first.

    To `tf.train.Checkpoint` it is the sum over the ranks.

    Attributes:
        factors: what gradients are multiplied by when they are summed: numbers, or Keras variables such as a loss scale. What is
            kept is in units of gradients without them.
    """

    def __init__(self, variable: Any, config: MeshConfig, codec: Compressor):
        mesh = config.mesh
        self.factors: list[Any] = []
        self._strategy = variable.distribute_strategy
        self._codec = codec
        # What ranks have of it before they are summed: the whole local tensor, or a sharding group's shard of that.
        self._layout = dataclasses.replace(variable.layout, data=Shard() if mesh.is_hybrid else Replicate())
        self._size = math.prod(self._layout.component_shape)
        self._summands = mesh.data_parallel_size // (mesh.num_shards if mesh.is_hybrid else 1)
        self._parts: list[tf.Variable] = in_separate_thread(functools.partial(self._make, variable.name.partition(":")[0]))

    def _make(self, name: str) -> list[tf.Variable]:
        parts = []
        for rank in self._strategy.extended.communicator.local_ranks:
            with tf.device(self._layout.mesh.devices[rank]):
                zeros = tf.zeros([self._size if self._stores(rank) else 0])
                parts.append(tf.Variable(self._words_of(zeros), trainable=False, name=f"{name}/residual"))
        return parts

    def _stores(self, rank: int) -> bool:
        return self._layout.stores(self._layout.mesh.coordinate(rank))

    # In a rank's step

    def part(self, program: RankProgram) -> tf.Variable:
        """Returns what the rank of `program` keeps, encoded: (words,) of float32, whose bits are those of int32."""
        return self._parts[program.local_index]

    def decoded(self, words: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
        """Returns what is kept in `words` as the part of a sum that has `shape`, padded with zeros."""
        numbers = self._multiplied(self._numbers_of(words), tf.multiply)
        missing = shape.num_elements() - self._size
        return tf.reshape(tf.pad(numbers, [[0, missing]]) if missing else numbers, shape)

    def encoded(self, lost: tf.Tensor) -> tf.Tensor:
        """Returns the words in which `lost`, of such a shape, is kept."""
        return self._words_of(self._multiplied(tf.reshape(lost, [-1])[: self._size], tf.divide))

    def _multiplied(self, numbers: tf.Tensor, by: Any) -> tf.Tensor:
        for factor in self.factors:
            numbers = by(numbers, tf.cast(tf.convert_to_tensor(factor), tf.float32))
        return numbers

    def _numbers_of(self, words: tf.Tensor) -> tf.Tensor:
        if not words.shape[0]:
            return tf.zeros([0])
        return self._codec.decode(tf.bitcast(words[tf.newaxis], tf.int32), self._size)[0]

    def _words_of(self, numbers: tf.Tensor) -> tf.Tensor:
        # As float32: TensorFlow keeps int32 in the host's memory.
        return tf.bitcast(self._codec.encode(numbers[tf.newaxis]), tf.float32)[0] if numbers.shape[0] else tf.zeros([0])

    # From outside

    @property
    def shape(self) -> tuple[int, ...]:
        """The variable's global shape."""
        return self._layout.shape

    def bytes_at(self, coordinate: Coordinate) -> int:
        """Returns the bytes that the rank at `coordinate` keeps."""
        return self._codec.bytes_of(self._size) if self._layout.stores(coordinate) else 0

    def numbers(self) -> list[tf.Tensor]:
        """Returns what each local rank keeps: flat, of the whole local variable, or of a sharding group's shard; none: empty."""
        numbers = []
        for part in self._parts:
            with tf.device(part.device):
                numbers.append(self._numbers_of(part.read_value()))
        return numbers

    def numpy(self) -> np.ndarray:
        """Returns the sum of what the ranks keep, of the variable's global shape. Of several workers all call it at once."""
        key = ("residual", self._layout)
        return cross_replica_of(self._strategy).call(key, self._sum, self.numbers())[0].numpy()

    def _sum(self, program: RankProgram, numbers: tf.Tensor) -> tf.Tensor:
        if self._stores(program.rank):
            ranks = program.group_ranks("replicate" if self._layout.is_data_sharded else "data")
            numbers = tf.reshape(group_ops.all_reduce(program, numbers, ranks, "sum", "residual"), self._layout.component_shape)
        return gather_whole(self._layout, program, numbers)

    def assign(self, total: Any) -> None:
        """Lets every rank keep its N-th of `total`, of the variable's global shape."""
        share = tf.constant(total, tf.float32) / self._summands
        for rank, part in zip(self._strategy.extended.communicator.local_ranks, self._parts, strict=True):
            if self._stores(rank):
                with tf.device(part.device):
                    local = packing.stored_part(share, self._layout, self._layout.mesh.coordinate(rank))
                    part.assign(self._words_of(tf.reshape(local, [-1])))

    def saved(self) -> np.ndarray:
        """Returns the sum, from which the ranks go on, too. Of several workers all call it at once."""
        total = self.numpy()
        self.assign(total)
        return total

    def serialize(self) -> bytes:
        return self.saved().tobytes()

    def deserialize(self, string_value: bytes) -> None:
        self.assign(np.frombuffer(string_value, np.float32).reshape(self._layout.shape))
