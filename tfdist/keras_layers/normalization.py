"""`BatchNormalization` of a batch that ranks share.

A layer normalises over its rank's examples; with `synchronized=True` over those of all ranks. Per channel, rank r has n_r
elements (valid ones, under a mask) of mean m_r, whose squared distances from m_r sum to q_r:

    m = sum_r n_r m_r / sum_r n_r      v = sum_r (q_r + n_r (m_r - m)^2) / sum_r n_r

which is the mean and the variance of all elements, without the cancellation of E(x^2) - E(x)^2. The ranks gather (n, m, q): one
all-gather forward, one reduce-scatter backward, so that gradients too are those of the global batch, whatever part of it a rank
got, also none. Keras under tf.distribute sends three all-reduces, and does not synchronise under a mask at all.

The moving statistics of an unsynchronized layer are averaged over the ranks at the end of the step, weighted by n_r (see
`statistics`): the moving mean is that of the global batch, the moving variance the mean of the ranks' variances, which leaves out
how much the ranks' means differ. Those of a synchronized layer are equal on all ranks anyway.

On no rows Keras's mean is NaN, and with it the gradient of `gamma`; here the moving statistics are used, and so stay as they
are, and that gradient is 0.

Source: the algebra is that of Chan, Golub and LeVeque 1979; PyTorch's SyncBatchNorm gathers as much.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import all_gather, rank_program
from tfdist.keras_layers.statistics import Statistics
from tfdist.losses.sliced_batch import OWN_ROWS
from tfdist.placements.repair import meant_of_own_rows


def moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None, local_moments: Callable[..., Any]
) -> Any:
    """Returns the mean and the variance by which `layer` normalizes, and notes what its moving statistics weigh.

    `inputs` and `mask` are as of `moments_over_ranks`; `local_moments` computes from the rank's own part, as Keras does.
    """
    program, rows = rank_program(peers_on="data"), OWN_ROWS.get()
    if program is None and rows is None:
        return local_moments(inputs, mask)
    if rows is not None:
        inputs, mask = inputs[:rows], mask if mask is None else mask[:rows]
    axes = layer._reduction_axes
    if program is not None and layer.synchronized:
        program.part(Statistics).agree(layer._non_trainable_variables)
        return moments_over_ranks(inputs, axes, mask)
    elements = _elements(inputs, axes)
    counted = elements
    if mask is not None:
        valid = tf.broadcast_to(tf.expand_dims(tf.cast(mask, tf.bool), -1), tf.shape(inputs))
        counted = tf.math.count_nonzero(valid)
    if program is not None:
        program.part(Statistics).weigh(layer._non_trainable_variables, counted)
    moving = (layer.moving_mean, layer.moving_variance)
    with meant_of_own_rows(program) as found:
        found += [
            tf.where(elements > 0, moment, tf.cast(kept, moment.dtype))
            for moment, kept in zip(local_moments(inputs, mask), moving, strict=True)
        ]
    return tuple(found)


def moments_over_ranks(inputs: tf.Tensor, axes: Sequence[int], mask: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance over the ranks of the data axis, (channels,), equal on all of them; 0 where nothing counts.

    Args:
        inputs: this rank's part of the batch, which may have no rows.
        axes: all axes but that of the channels.
        mask: of the shape of `inputs` without the last axis; True where an element counts. None: all do.
    """
    if mask is not None:
        valid = tf.broadcast_to(tf.expand_dims(tf.cast(mask, tf.bool), -1), tf.shape(inputs))
        inputs = tf.where(valid, inputs, tf.zeros_like(inputs))
    total = tf.reduce_sum(inputs, axes, keepdims=True)
    if mask is None:
        count = tf.fill(tf.shape(total), tf.cast(_elements(inputs, axes), inputs.dtype))
    else:
        count = tf.math.count_nonzero(valid, axes, keepdims=True, dtype=inputs.dtype)
    with meant_of_own_rows(rank_program()) as found:  # what the others need is sent
        mean = tf.math.divide_no_nan(total, count)
        # The distances from the mean have no gradient through the mean: they sum to zero.
        distances = tf.math.squared_difference(inputs, tf.stop_gradient(mean))
        if mask is not None:
            distances = tf.where(valid, distances, tf.zeros_like(distances))
        flat = [tf.reshape(x, [-1]) for x in (count, mean, tf.reduce_sum(distances, axes, keepdims=True))]
        found += [mean, *flat]
    gathered = all_gather(tf.stack(flat)[tf.newaxis], "data", label="batch_normalization")  # (ranks, 3, channels)
    counts, means, distances = tf.unstack(gathered, axis=1)
    counts = tf.stop_gradient(counts)
    total = tf.reduce_sum(counts, 0)
    if mask is not None:
        total += keras.config.epsilon()  # as Keras divides there
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), total)
    variance = tf.math.divide_no_nan(tf.reduce_sum(distances + counts * tf.math.squared_difference(means, mean), 0), total)
    return mean, variance


def _elements(inputs: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Returns the number of elements per channel, as int64."""
    return tf.reduce_prod(tf.gather(tf.shape(inputs, out_type=tf.int64), axes))
