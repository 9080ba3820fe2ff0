"""The weight of the losses of a part of the global batch in the loss of the whole."""

import abc

import tensorflow as tf

from tfdist.collectives import Part, RankProgram
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.totals import wide


class BatchPart(abc.ABC):
    """Some rows of the global batch, whose losses are computed by themselves: all rows of a rank, or a slice of them."""

    @abc.abstractmethod
    def fraction(self) -> tf.Tensor:
        """Returns the part's rows over those of the global batch, a float64 scalar."""

    def weigh(self, mean: tf.Tensor) -> tf.Tensor:
        """Returns the part's share of a mean over the global batch, from the `mean` over the part's rows; 0 without rows."""
        fraction = tf.cast(self.fraction(), mean.dtype)
        return fraction * tf.where(fraction > 0, mean, tf.zeros_like(mean))

    def mean_of_share(self, share: tf.Tensor) -> tf.Tensor:
        """Returns the number of which `weigh` makes `share`; 0 without rows."""
        return tf.math.divide_no_nan(share, tf.cast(self.fraction(), share.dtype))

    def divisor(self, values: tf.Tensor, weights: tf.Tensor | None, mask: tf.Tensor | None) -> tf.Tensor:
        """Returns what the sum of the part's losses, `values`, is divided by, to become a share of the global batch's mean.

        That is the sum of `weights` over the global batch or, without weights, the count of the losses that `mask` leaves. A mask
        may have fewer elements than `values`, to which it is then broadcast.
        """
        if weights is not None:
            # Weights that a model computes get the gradient that they have on one device: an all-reduce carries it.
            return self.totals([], [tf.reduce_sum(weights)])[0]
        dtype = wide(values).dtype
        if mask is None:  # numbers of losses have no derivative; out of a branch none could be sent back
            return tf.stop_gradient(self.totals([tf.cast(tf.size(values), dtype)], [])[0])
        sizes = [tf.cast(tf.size(x), dtype) for x in (values, mask)]
        elements, maskable, valid = self.totals(sizes, [tf.reduce_sum(tf.cast(mask, dtype))])
        return tf.stop_gradient(elements * tf.math.divide_no_nan(valid, maskable))

    @abc.abstractmethod
    def totals(self, counts: list[tf.Tensor], sums: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums over the global batch of this part's `counts`, which follow from shapes, and `sums`, of its data."""


class RankBatch(BatchPart, Part):
    """The part of the global batch that one rank has in one trace; a part of its state.

    Attributes:
        added: the losses that layers add on an eager rank, by the id of the layer.
    """

    def __init__(self, program: RankProgram):
        self._rows = program.part(RankRows)
        self.added: dict[int, list[tf.Tensor]] = {}

    def fraction(self) -> tf.Tensor:
        return self._rows.weight()

    def totals(self, counts: list[tf.Tensor], sums: list[tf.Tensor]) -> list[tf.Tensor]:
        return self._rows.sums_over_ranks([*counts, *sums], "loss/divisor")

    def logged(self, value: tf.Tensor) -> tf.Tensor:
        """Returns what is logged of a loss of which this rank has the share `value`."""
        values = wide(value)
        if value.shape.rank == 0:
            (loss,) = self._rows.sums_over_ranks([values], "loss/value")
        else:
            # With reduction None a loss has one value per example, and Keras logs their mean.
            summands = [tf.reduce_sum(values), tf.cast(tf.size(values), values.dtype)]
            total, count = self._rows.sums_over_ranks(summands, "loss/value")
            loss = tf.math.divide_no_nan(total, count)
        return tf.cast(loss, value.dtype)
