"""The losses of the rows of the global batch that one rank has."""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.losses.batch_part import BatchPart, widened
from tfdist.placements.rank_rows import RankRows


class RankBatch(BatchPart):
    """The part of the global batch that one rank has in one trace; an attachment of the rank's program."""

    def __init__(self, program: RankProgram):
        self._rows: RankRows = program.attachment(RankRows)

    def fraction(self) -> tf.Tensor:
        return self._rows.weight()

    def weigh_share(self, share: tf.Tensor) -> tf.Tensor:
        return share

    def divisor(self, values: tf.Tensor, weights: tf.Tensor | None, mask: tf.Tensor | None) -> tf.Tensor:
        if weights is not None:
            # Weights that a model computes get the gradient that they have on one device: the all-reduce carries it.
            return self._rows.sums_over_ranks([tf.reduce_sum(weights)], "loss/divisor")[0]
        dtype = widened(values).dtype
        if mask is None:
            return self._rows.sums_over_ranks([tf.cast(tf.size(values), dtype)], "loss/divisor")[0]
        sizes = [tf.cast(tf.size(x), dtype) for x in (values, mask)]
        summands = [*sizes, tf.reduce_sum(tf.cast(mask, dtype))]
        elements, maskable, valid = self._rows.sums_over_ranks(summands, "loss/divisor")
        return elements * tf.math.divide_no_nan(valid, maskable)

    def logged(self, value: tf.Tensor) -> tf.Tensor:
        wide = widened(value)
        if value.shape.rank == 0:
            (loss,) = self._rows.sums_over_ranks([wide], "loss/value")
        else:
            # With reduction None a loss has one value per example, and Keras logs their mean.
            summands = [tf.reduce_sum(wide), tf.cast(tf.size(wide), wide.dtype)]
            total, count = self._rows.sums_over_ranks(summands, "loss/value")
            loss = tf.math.divide_no_nan(total, count)
        return tf.cast(loss, value.dtype)
