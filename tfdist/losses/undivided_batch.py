"""The batch of `train_on_batch` and `test_on_batch`: every rank is given all of its rows.

What is a mean over rows is one device's then, also what no rank could compute of its own rows: statistics of the batch, rows that
are compared with each other. What adds up over rows must count them once: metrics are updated with the rows of one of the ranks
that have them, and a sum is divided by how many these are.

Over several workers a batch that is the same on all of them is the global batch; batches that differ are parts of one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives import Part, RankProgram, all_reduce, rank_program
from tfdist.placements.rank_rows import RankRows
from tfdist.sharding.fingerprints import fingerprint

# Stands beside such a batch. A string, by which a `tf.function` tells its traces apart.
_MARK = "tfdist: every rank gets this batch"


class GivenBatch(Part):
    """Whether a rank was given all rows of the batch, in one trace. A part of its state.

    Attributes:
        copies: how many ranks have the rows that this one has, a number or a scalar; 1 where each has its own.
        counts: whether this rank's rows count where rows are summed.
    """

    def __init__(self, program: RankProgram):
        self._program = program
        self.copies: Any = 1
        self.counts: Any = True
        self._once: dict[int, tuple[Any, Any]] = {}  # with what it was made of: a number is that of a living object

    def give(self, data: Any) -> None:
        """Notes that the rank was given `data`, as every other rank of its worker was."""
        program = self._program
        mesh = program.mesh
        here = sorted({mesh.coordinate(rank).data for rank in program.communicator.local_ranks})
        index = mesh.coordinate(program.rank).data
        program.part(RankRows).are_everywhere, self.copies, self.counts = True, mesh.size("data"), index == 0
        if len(here) < mesh.size("data"):
            is_same = _is_same(data)
            self.copies = tf.where(is_same, self.copies, len(here))
            self.counts = tf.logical_and(index == here[0], tf.logical_or(index == 0, tf.logical_not(is_same)))

    def once(self, x: Any) -> Any:
        """Returns `x`, a tensor of rows, dense, ragged or sparse, without any where another rank's count; a number becomes 0."""
        if self.counts is True:
            return x
        if x.shape.rank == 0:
            return x * tf.cast(self.counts, x.dtype)
        if id(x) not in self._once:
            some = self._rows_once(x)
            if not self._program.exists_here(tf.nest.flatten(some, expand_composites=True)[0]):
                return some
            self._once[id(x)] = (x, some)
        return self._once[id(x)][1]

    def _rows_once(self, x: Any) -> Any:
        if isinstance(x, tf.SparseTensor):
            return tf.sparse.retain(x, tf.fill(tf.shape(x.values), self.counts))
        rows = x.nrows() if isinstance(x, tf.RaggedTensor) else tf.shape(x, out_type=tf.int64)[0]
        # Opaque to shape inference: all ranks have tensors of one static shape.
        rows = tf.compat.v1.placeholder_with_default(tf.where(self.counts, rows, 0), [])
        some = x[:rows]
        if not isinstance(x, tf.RaggedTensor):
            some.set_shape([None, *x.shape[1:]])
        return some


def is_given_everywhere() -> bool:
    """Whether the rank whose step is traced or runs here was given all rows of the batch."""
    program = rank_program(peers_on="data")
    return program is not None and program.part(RankRows).are_everywhere


class DealtBatches(list[Any]):
    """Batches of which each rank gets rows of its own, as of a distributed iterator's."""


def of_given_batches(step: Callable[[Any], Any], make: Callable[[Callable[[Any], Any]], Any]) -> Callable[[Any], Any]:
    """Returns the function `make(step)` of an iterator, as Keras makes it, of whose elements the ranks may be given all.

    They are if the iterator is no distributed one, and no `DealtBatches`.
    """

    def of_element(data: Any) -> Any:
        if not (isinstance(data, tuple) and isinstance(data[-1], str) and data[-1] == _MARK):
            return step(data)
        data = tf.nest.map_structure(lambda x: tf.convert_to_tensor(x) if isinstance(x, np.ndarray) else x, data[0])
        program = rank_program(peers_on="data")
        if program is not None:
            program.part(GivenBatch).give(data)
        return step(data)

    function = make(of_element)

    def call(iterator: Any) -> Any:
        if isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator | DealtBatches):
            return function(iterator)
        return function((data, _MARK) for data in iterator)

    return call


def _is_same(data: Any) -> tf.Tensor:
    """Returns whether all data ranks have the same `data`, a boolean scalar; one message of two numbers."""
    leaves = [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if leaf is not None]
    numbers = [fingerprint(tf.convert_to_tensor(leaf)) for leaf in leaves]
    total = tf.add_n([number * (2 * place + 1) for place, number in enumerate(numbers)]) if numbers else tf.zeros([], tf.int64)
    total = tf.bitwise.bitwise_and(total, 2**62 - 1)
    largest, smallest = tf.unstack(all_reduce(tf.stack([total, -total]), "data", reduce_op="max", label="loss/same_batch"))
    return tf.equal(largest, -smallest)
