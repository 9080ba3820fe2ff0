"""Cross-entropy of integer labels in as few passes over the logits as TensorFlow's vectorised operations allow.

    loss_i = log sum_v exp(s_iv) - s_iy,     s_iv = l_iv - max_v l_iv
    d loss_i / d l_iv = exp(s_iv) / sum_v exp(s_iv) - [v = y]

TensorFlow's own kernel goes over the logits in a scalar loop, and takes three times as long on one core
(docs/notes/kernels.md). Both hold one tensor of the logits' size from forward to backward.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.custom_gradients import custom_gradient


@custom_gradient
def sparse_crossentropy(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, None]]]:
    """Returns the loss of each position; differentiable in `logits`, (positions, classes), float32 or float64, twice as well.

    On a CPU a label outside [0, classes) raises InvalidArgumentError, as in TensorFlow's kernel.
    """
    shifted = logits - tf.reduce_max(logits, -1, keepdims=True)
    of_label = tf.gather(shifted, labels, batch_dims=1)
    with tf.control_dependencies([of_label]):  # the last but one that reads `shifted`, whose memory the exponentials take
        exponentials = tf.exp(shifted)
    total = tf.reduce_sum(exponentials, -1)

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
        places = tf.stack([tf.range(tf.size(labels, out_type=labels.dtype)), labels], -1)
        return tf.tensor_scatter_nd_sub(exponentials * (upstream / total)[:, tf.newaxis], places, upstream), None

    return tf.math.log(total) - of_label, gradient


def of_logits(target: Any, output: Any, axis: int) -> tf.Tensor | None:
    """Returns the loss of each position of `output`, logits, as Keras does; None where its own function must be called.

    That is where classes are on another axis than the last, where Keras takes a softmax's argument for its result, and where
    labels, of the shape of `output` without its last axis or with one of size 1, have another, which Keras refuses.
    """
    if not isinstance(output, tf.Tensor) or output.dtype not in (tf.float32, tf.float64):
        return None
    rank, labels = output.shape.rank, tf.cast(tf.convert_to_tensor(target), tf.int64)
    if rank is None or rank < 2 or output.shape[-1] is None or axis not in (-1, rank - 1):
        return None
    if hasattr(output, "_keras_logits") or (hasattr(output, "op") and output.op.type == "Softmax"):
        return None
    if labels.shape.rank == rank and labels.shape[-1] == 1:
        labels = tf.squeeze(labels, -1)
    if labels.shape.rank is None or not labels.shape.is_compatible_with(output.shape[:-1]):
        return None
    losses = sparse_crossentropy(tf.reshape(output, [-1, output.shape[-1]]), tf.reshape(labels, [-1]))
    return tf.reshape(losses, tf.shape(labels))
