"""The rows of the global batch that one rank has."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, all_reduce
from tfdist.losses.batch_part import BatchPart, widened


class RankBatch(BatchPart):
    """The part of the global batch that one rank has in one trace; an attachment of the rank's program.

    The batch is the first tensor that has rows among the arguments of the function given to `strategy.run`: `x` in `fit`. If the
    function has no such argument, every rank counts as one row.

    Attributes:
        rows: how many rows the rank has, an int64 scalar.
    """

    def __init__(self, program: RankProgram):
        self._program = program
        with program.outermost():
            self.rows = _rows(program.arguments)
        self._fraction: tf.Tensor | None = None
        self._sends_rows_along = False

    @property
    def is_counted(self) -> bool:
        """Whether `fraction` sends nothing any more."""
        return self._fraction is not None

    def fraction(self) -> tf.Tensor:
        """Returns the rank's rows over those of all data ranks, a float64 scalar; one message of 1 number, once a trace."""
        if self._fraction is not None:
            return self._fraction
        return self._fraction_of(all_reduce(tf.cast(self.rows, tf.float64), "data", label="loss/rows"))

    def send_rows_along(self) -> None:
        """Lets the first message of a loss count all ranks' rows, too, so that `fraction` needs none of its own."""
        self._sends_rows_along = True

    def weigh_share(self, share: tf.Tensor) -> tf.Tensor:
        return share

    def _fraction_of(self, all_rows: tf.Tensor) -> tf.Tensor:
        fraction = tf.math.divide_no_nan(tf.cast(self.rows, tf.float64), all_rows)
        if self._program.exists_here(fraction):
            self._fraction = fraction
        return fraction

    def _sums_over_ranks(self, scalars: list[tf.Tensor], label: str) -> list[tf.Tensor]:
        """Sums each of `scalars` over the ranks, all in one message."""
        dtype = scalars[0].dtype
        if self._fraction is not None or not self._sends_rows_along:
            return tf.unstack(all_reduce(tf.stack(scalars), "data", label=label))
        numbers = [tf.cast(scalar, tf.float64) for scalar in (*scalars, self.rows)]
        *sums, all_rows = tf.unstack(all_reduce(tf.stack(numbers), "data", label=label))
        self._fraction_of(tf.stop_gradient(all_rows))
        return [tf.cast(total, dtype) for total in sums]

    def divisor(self, values: tf.Tensor, weights: tf.Tensor | None, mask: tf.Tensor | None) -> tf.Tensor:
        if weights is not None:
            # Weights that a model computes get the gradient that they have on one device: the all-reduce carries it.
            return self._sums_over_ranks([tf.reduce_sum(weights)], "loss/divisor")[0]
        dtype = widened(values).dtype
        if mask is None:
            return self._sums_over_ranks([tf.cast(tf.size(values), dtype)], "loss/divisor")[0]
        sizes = [tf.cast(tf.size(x), dtype) for x in (values, mask)]
        elements, maskable, valid = self._sums_over_ranks([*sizes, tf.reduce_sum(tf.cast(mask, dtype))], "loss/divisor")
        return elements * tf.math.divide_no_nan(valid, maskable)

    def logged(self, value: tf.Tensor) -> tf.Tensor:
        wide = widened(value)
        if value.shape.rank == 0:
            (loss,) = self._sums_over_ranks([wide], "loss/value")
        else:
            # With reduction None a loss has one value per example, and Keras logs their mean.
            total, count = self._sums_over_ranks([tf.reduce_sum(wide), tf.cast(tf.size(wide), wide.dtype)], "loss/value")
            loss = tf.math.divide_no_nan(total, count)
        return tf.cast(loss, value.dtype)


def _rows(arguments: Any) -> tf.Tensor:
    for leaf in tf.nest.flatten(arguments):
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.nrows(out_type=tf.int64)
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if tf.is_tensor(leaf) and leaf.shape.rank != 0:
            return tf.shape(leaf, out_type=tf.int64)[0]
    return tf.constant(1, tf.int64)
