"""How many rows of the batch a rank has, and what part of the global batch that is."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, all_reduce


class BatchRows:
    """The rows of one rank in one trace; an attachment of its program.

    The batch is the first tensor that has rows among the arguments of the function given to `strategy.run`: `x` in `fit`. A
    function without such an argument counts as one row on each rank.

    Attributes:
        local: this rank's rows, an int64 scalar.
    """

    def __init__(self, program: RankProgram):
        self._program = program
        with program.outermost():
            self.local = _rows(program.arguments)
        self._share: tf.Tensor | None = None

    def share(self) -> tf.Tensor:
        """Returns this rank's rows over those of all data ranks, a float64 scalar; one message of 1 number, once a trace."""
        if self._share is not None:
            return self._share
        rows = tf.cast(self.local, tf.float64)
        share = tf.math.divide_no_nan(rows, all_reduce(rows, "data", label="loss/rows"))
        if self._program.exists_here(share):
            self._share = share
        return share

    def weigh(self, mean: tf.Tensor) -> tf.Tensor:
        """Returns this rank's part of a mean over the global batch, from the `mean` over its own rows; 0 without rows."""
        share = tf.cast(self.share(), mean.dtype)
        return share * tf.where(share > 0, mean, tf.zeros_like(mean))


def _rows(arguments: Any) -> tf.Tensor:
    for leaf in tf.nest.flatten(arguments):
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.nrows(out_type=tf.int64)
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if tf.is_tensor(leaf) and leaf.shape.rank != 0:
            return tf.shape(leaf, out_type=tf.int64)[0]
    return tf.constant(1, tf.int64)
