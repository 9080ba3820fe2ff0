"""Losses inside `strategy.run`: a rank's share of the mean over the global batch.

Rank r has the weighted sum S_r of its examples' losses and a divisor D_r: how many they are (valid ones, under a mask), or what
their weights sum to. N ranks:

    Keras under tf.distribute      sum_r S_r / D_r / N          a mean of means
    one device, and tfdist         sum_r S_r / sum_s D_s        the mean of the global batch

The two differ as soon as the D_r do: in a last partial batch, with masks or with weights. Here rank r's loss is its share,
S_r / sum_s D_s: shares, and so their gradients, add up to those of the global batch, and a rank without examples has share 0.

Nobody shares in cross-replica context and in Keras's symbolic build, where no rank computes. Metrics add up numerators and counts
already (see `tfdist.metrics`).

    reduce_weighted_values    a rank's share instead of the scaled local mean. One all-reduce of 1 number, of 3 with a mask
    scale_loss                `add_loss` and regularizers: weighted by rows. One all-reduce of 1 number a step
    unscale_loss              what is logged: the sum of the shares. One all-reduce of 1 number, of 2 for the reduction None

A loss in a loop inside `strategy.run` (`tf.map_fn`) raises, as every collective does there.

Note: losses that are one number. A loss that returns a scalar has averaged its rank's batch itself (a function that ends in
`tf.reduce_mean`; `Dice` and `Tversky` without `axis`; `MeanSquaredError` of vectors). Keras does not scale it, and N ranks would
train N times as fast as one; `add_loss` and `activity_regularizer` it divides by N. Here each is weighted by the rank's part
of the batch's rows, which is exact if it is a mean over rows, or, as a weight's regularizer, has nothing to do with them. It is
not for what is no mean of rows' losses: a sum (take the mean), or `Dice`, a ratio of sums. What `add_loss` gets from a Keras
loss is a share already and stays one (a sum of such a share and of another mean, in one call, would be mistaken for it: call
twice).
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss

from tfdist.collectives import RankProgram, all_reduce, rank_program
from tfdist.losses.batch_rows import BatchRows
from tfdist.losses.microbatches import MicrobatchLosses, current_losses
from tfdist.losses.shares import Shares

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def is_shared() -> bool:
    """Whether the batch of which losses are computed here is a part of one: a rank's, or a microbatch."""
    return rank_program(peers_on="data") is not None or current_losses() is not None


def reduce_weighted_values(values: Any, sample_weight: Any, mask: Any, reduction: str, dtype: Any) -> Any:
    """As Keras's function of this name, for one of the reductions `MEANS` where the batch `is_shared`: this part's share."""
    program, microbatch = rank_program(peers_on="data"), current_losses()
    values, weights, mask = (
        x if x is None else keras.ops.convert_to_tensor(x, dtype=dtype) for x in (values, sample_weight, mask)
    )
    # For sums Keras takes a mask as weights 0 and 1; for means as 0 and total/valid of the local batch.
    weights = keras_loss.apply_mask(weights, mask, dtype=values.dtype, reduction="sum")
    if weights is not None:
        weights = tf.cast(weights, values.dtype)
        values, weights = keras_loss.squeeze_or_expand_to_same_rank(values, weights)
        values *= weights
    if values.shape.rank == 0:  # see the note: losses that are one number
        weigh = program.attachment(BatchRows).weigh if microbatch is None else microbatch.weigh
        return _noted(weigh(values), program)
    total = tf.reduce_sum(_widened(values))
    is_weighted = reduction == "mean_with_sample_weight" and weights is not None
    divisor = (_divisor_of_ranks if microbatch is None else functools.partial(_divisor_of_microbatches, microbatch))(
        values, _widened(weights) if is_weighted else None, mask, total.dtype
    )
    return _noted(tf.cast(tf.math.divide_no_nan(total, divisor), values.dtype), program)


def _divisor_of_ranks(values: tf.Tensor, weights: tf.Tensor | None, mask: tf.Tensor | None, dtype: tf.DType) -> tf.Tensor:
    """Returns what all ranks' sums of losses are divided by."""
    if weights is not None:
        # Weights that a model computes get the gradient that they have on one device: the all-reduce carries it.
        return _sums_over_ranks([tf.reduce_sum(weights)], "loss/divisor")[0]
    if mask is None:
        return _sums_over_ranks([tf.cast(tf.size(values), dtype)], "loss/divisor")[0]
    # A mask may have fewer elements than the values that it is broadcast to.
    sizes = [tf.cast(tf.size(x), dtype) for x in (values, mask)]
    elements, maskable, valid = _sums_over_ranks([*sizes, tf.reduce_sum(tf.cast(mask, dtype))], "loss/divisor")
    return elements * tf.math.divide_no_nan(valid, maskable)


def _divisor_of_microbatches(
    microbatch: MicrobatchLosses, values: tf.Tensor, weights: tf.Tensor | None, mask: tf.Tensor | None, dtype: tf.DType
) -> tf.Tensor:
    """Returns what the sums of losses of all microbatches of all ranks are divided by."""
    if weights is not None:
        return microbatch.total(tf.reduce_sum(weights))
    elements = microbatch.total_count(tf.cast(tf.size(values), dtype))
    if mask is None:
        return elements
    valid = microbatch.total(tf.reduce_sum(tf.cast(mask, dtype)))
    return elements * tf.math.divide_no_nan(valid, microbatch.total_count(tf.cast(tf.size(mask), dtype)))


def _noted(share: tf.Tensor, program: RankProgram | None) -> tf.Tensor:
    """Notes `share` as one, so that it is not weighted again; None: nothing would."""
    return share if program is None else program.attachment(Shares).add(share)


def scale_loss(value: Any) -> Any:
    """Returns what a mean over a part of the batch, such as a layer's loss, counts in the step's loss."""
    program, microbatch = rank_program(peers_on="data"), current_losses()
    if program is None and microbatch is None:
        return value
    value = tf.convert_to_tensor(value)
    if program is not None and program.attachment(Shares).is_share(value):
        return value
    return (program.attachment(BatchRows) if microbatch is None else microbatch).weigh(value)


def unscale_loss(value: Any) -> Any:
    """Returns what is logged of a step's loss, of which each rank has its share."""
    program, microbatch = rank_program(peers_on="data"), current_losses()
    if program is None and microbatch is None:
        return value
    value = tf.stop_gradient(tf.convert_to_tensor(value))
    if microbatch is not None:
        return value  # `pipeline` adds the microbatches' shares up before they are logged
    wide = _widened(value)
    if value.shape.rank == 0:
        (loss,) = _sums_over_ranks([wide], "loss/value")
    else:
        # With reduction None a loss has one value per example, and Keras logs their mean.
        total, count = _sums_over_ranks([tf.reduce_sum(wide), tf.cast(tf.size(wide), wide.dtype)], "loss/value")
        loss = tf.math.divide_no_nan(total, count)
    return tf.cast(loss, value.dtype)


def _widened(x: tf.Tensor) -> tf.Tensor:
    """Returns `x` in a dtype that holds a batch's sums and counts: half precision overflows or stops counting."""
    return tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x


def _sums_over_ranks(scalars: list[tf.Tensor], label: str) -> list[tf.Tensor]:
    """Sums each of `scalars` over the ranks, all in one message."""
    return tf.unstack(all_reduce(tf.stack(scalars), "data", label=label))
