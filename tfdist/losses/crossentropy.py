"""Cross-entropy of integer labels in as few passes over the logits as TensorFlow's vectorised operations allow.

    loss_i = log sum_v exp(s_iv) - s_iy,     s_iv = l_iv - max_v l_iv
    d loss_i / d l_iv = exp(s_iv) / sum_v exp(s_iv) - [v = y]

TensorFlow's own kernel goes over the logits in a scalar loop, and takes three times as long on one core (docs/performance.md).
Both hold one tensor of the logits' size from forward to backward.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf


def sparse_crossentropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the loss of each position; differentiable in `logits`, twice as well.

    Args:
        logits: (positions, classes), float32 or float64.
        labels: (positions,), int32 or int64, in [0, classes).

    Returns:
        (positions,), of the logits' dtype.

    Raises:
        tf.errors.InvalidArgumentError: when run on a CPU, if a label is out of range; TensorFlow's kernel raises it, too.
    """
    total, of_label = exponential_sums(logits, tf.stop_gradient(tf.reduce_max(logits, -1)), labels)
    return tf.math.log(total) - of_label


@tf.custom_gradient
def exponential_sums(
    logits: tf.Tensor, shift: tf.Tensor, labels: tf.Tensor
) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., tuple]]:
    """Returns the sum of exp(logits - shift) of each position, and the label's logit less the shift.

    Args:
        logits: (positions, classes), float32 or float64.
        shift: (positions,), which counts as constant.
        labels: (positions,), int32 or int64, in [0, classes).

    Returns:
        Two tensors of shape (positions,).
    """
    shifted = logits - shift[:, tf.newaxis]
    of_label = tf.gather(shifted, labels, batch_dims=1)
    exponentials = tf.exp(shifted)

    def gradient(of_sum: tf.Tensor, of_label: tf.Tensor) -> tuple[tf.Tensor, None, None]:
        places = tf.stack([tf.range(tf.size(labels, out_type=labels.dtype)), labels], -1)
        return tf.tensor_scatter_nd_add(exponentials * of_sum[:, tf.newaxis], places, of_label), None, None

    return (tf.reduce_sum(exponentials, -1), of_label), gradient
