"""What the losses of a part of the global batch count in the loss of the whole."""

from __future__ import annotations

import abc

import tensorflow as tf


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

    @abc.abstractmethod
    def weigh_share(self, share: tf.Tensor) -> tf.Tensor:
        """Returns the share of the global batch's loss, from this rank's `share` of the loss of all ranks' parts together."""

    @abc.abstractmethod
    def divisor(self, values: tf.Tensor, weights: tf.Tensor | None, mask: tf.Tensor | None) -> tf.Tensor:
        """Returns what the sum of the part's losses, `values`, is divided by, to become a share of the global batch's mean.

        That is the sum of `weights` over the global batch or, without weights, the count of the losses that `mask` leaves. A mask
        may have fewer elements than `values`, to which it is then broadcast.
        """

    @abc.abstractmethod
    def logged(self, value: tf.Tensor) -> tf.Tensor:
        """Returns what is logged of a loss of which this part has the share `value`."""


def widened(x: tf.Tensor) -> tf.Tensor:
    """Returns `x` in a dtype that holds a batch's sums and counts: half precision overflows or stops counting."""
    return tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x
