"""Cross-entropy of integer labels in as few passes over the logits as TensorFlow's vectorised operations allow.

    loss_i = log sum_v exp(s_iv) - s_iy,     s_iv = l_iv - max_v l_iv
    d loss_i / d l_iv = exp(s_iv) / sum_v exp(s_iv) - [v = y]

TensorFlow's own kernel goes over the logits in a scalar loop, and takes three times as long on one core
(docs/notes/performance.md). Both hold one tensor of the logits' size from forward to backward.

The name is private to Keras: tests/losses/test_private_names_of_losses.py fails when it changes.

    nn.sparse_categorical_crossentropy    of logits on a CPU: this one in the place of TensorFlow's kernel
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import nn as keras_nn

from tfdist.collectives import RankProgram, rank_program
from tfdist.override import override


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


@override("sparse_categorical_crossentropy", keras_nn)
def _sparse_categorical_crossentropy(
    original: Callable[..., Any], target: Any, output: Any, from_logits: bool = False, axis: int = -1
) -> Any:
    if not (_on_a_cpu(rank_program()) and from_logits and _are_logits(output, axis)):
        return original(target, output, from_logits=from_logits, axis=axis)
    labels = tf.cast(tf.convert_to_tensor(target), tf.int64)
    if labels.shape.rank == output.shape.rank and labels.shape[-1] == 1:
        labels = tf.squeeze(labels, -1)
    if labels.shape.rank is None or not labels.shape.is_compatible_with(output.shape[:-1]):
        return original(target, output, from_logits=from_logits, axis=axis)  # which raises
    losses = sparse_crossentropy(tf.reshape(output, [-1, output.shape[-1]]), tf.reshape(labels, [-1]))
    return tf.reshape(losses, tf.shape(labels))


def _on_a_cpu(program: RankProgram | None) -> bool:
    """On a GPU TensorFlow's kernel is good, and another would not notice a label that is out of range."""
    return program is not None and program.is_on_cpu


def _are_logits(output: Any, axis: int) -> bool:
    """Whether Keras takes `output` as it is: of a softmax's result it takes the argument."""
    if not isinstance(output, tf.Tensor) or output.dtype not in (tf.float32, tf.float64):
        return False
    rank = output.shape.rank
    if rank is None or rank < 2 or output.shape[-1] is None or axis not in (-1, rank - 1):
        return False
    is_softmax = hasattr(output, "op") and output.op.type == "Softmax"
    return not (is_softmax or hasattr(output, "_keras_logits"))
