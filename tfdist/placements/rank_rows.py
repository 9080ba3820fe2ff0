"""The rows of the global batch that one rank has, and its weight in means over all rows."""

import contextlib
from typing import Any

import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import Part, RankProgram, all_gather, all_reduce


class RankRows(Part):
    """The part of the global batch that one rank has in one trace. A part of its state.

    The batch is the first tensor that has rows among the arguments of the function given to `strategy.run`: `x` in `fit`. If the
    function has no such argument, every rank counts as one row.

    Attributes:
        rows: how many rows the rank has, an int64 scalar.
        are_everywhere: whether all ranks have the same rows, those of the batch.
        model: what Keras's trainer trains or tests in this trace; None: no trainer runs it.
        are_means: whether the losses of this trace are the ranks' own means, as in a step of Keras's trainer; else their shares.
        factor: what the gradient that is being taken will be multiplied by where it is reduced; None: 1.
        sends_rows_along: whether the first message of sums counts all ranks' rows, too, so that `weight` needs none of its own.
    """

    def __init__(self, program: RankProgram):
        self._program = program
        with program.outermost():
            self.rows = _rows(program.arguments)
        self.model: Any = None
        self.are_means = False
        self.are_everywhere = False
        self.factor: tf.Tensor | None = None
        self.sends_rows_along = False
        self._weight: tf.Tensor | None = None
        self._place: tuple[tf.Tensor, tf.Tensor, tf.Tensor] | None = None

    @property
    def are_of_slices(self) -> bool:
        """Whether what is computed here is computed of some of the rank's rows at a time, as the layers of a pipeline are."""
        return self._program.mesh.splits_layers and not self.are_means

    @property
    def is_counted(self) -> bool:
        """Whether `weight` sends nothing any more."""
        return self._weight is not None

    def weight(self) -> tf.Tensor:
        """Returns the rank's rows over those of all data ranks, a float64 scalar; one message of 1 number, once a trace."""
        if self._weight is not None:
            return self._weight
        return self.note_all_rows(all_reduce(tf.cast(self.rows, tf.float64), "data", label="loss/rows"))

    def place(self, label: str) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns how many rows the ranks before this one have, it itself, and all; one message of 1 number of each rank, once a
        trace."""
        if self._place is not None:
            return self._place
        with self._program.outermost():
            counts = all_gather(tf.reshape(self.rows, [1]), "data", label=f"{label}/rows")
            before = self._program.mesh.coordinate(self._program.rank).data
            self._place = tf.reduce_sum(counts[:before]), self.rows, tf.reduce_sum(counts)
        return self._place

    def note_all_rows(self, all_rows: tf.Tensor) -> tf.Tensor:
        """Notes how many rows all data ranks have, so that `weight` needs no message; returns that."""
        weight = tf.math.divide_no_nan(tf.cast(self.rows, tf.float64), tf.cast(all_rows, tf.float64))
        if self._program.exists_here(weight):
            self._weight = weight
        return weight

    def those_of(self, rows: tf.Tensor, weight: tf.Tensor) -> contextlib.AbstractContextManager[None]:
        """A block whose losses are the ranks' own means over batches of which this rank has `rows` rows."""
        return temporary.attributes(self, rows=tf.cast(rows, tf.int64), _weight=weight, _place=None, are_means=True)

    def is_weight(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is what `weight` returns."""
        if self._weight is None or not tf.is_symbolic_tensor(tensor):
            return tensor is self._weight
        return tensor.graph is self._weight.graph and tensor.name == self._weight.name

    def sums_over_ranks(self, scalars: list[tf.Tensor], label: str) -> list[tf.Tensor]:
        """Sums each of `scalars`, of one dtype, over the ranks, all in one message."""
        dtype = scalars[0].dtype
        if self._weight is not None or not self.sends_rows_along:
            return tf.unstack(all_reduce(tf.stack(scalars), "data", label=label))
        numbers = [tf.cast(scalar, tf.float64) for scalar in (*scalars, self.rows)]
        *sums, all_rows = tf.unstack(all_reduce(tf.stack(numbers), "data", label=label))
        self.note_all_rows(tf.stop_gradient(all_rows))
        return [tf.cast(total, dtype) for total in sums]


def _rows(arguments: Any) -> tf.Tensor:
    for leaf in tf.nest.flatten(arguments):
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.nrows(out_type=tf.int64)
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if tf.is_tensor(leaf) and leaf.shape.rank != 0:
            return tf.shape(leaf, out_type=tf.int64)[0]
    return tf.constant(1, tf.int64)
