"""Cross-entropy of logits that are spread over the tensor ranks by vocabulary.

    loss = log sum_v exp(l_v) - l_y
         = log sum_r sum_{v of r} exp(l_v - m) + m - l_y,    m = max_v l_v

Each rank takes the maximum, the sum and, if it has it, the logit of the label, of its own part. Backward nothing moves.
"""

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.collectives import activations
from tfdist.custom_gradients import custom_gradient
from tfdist.extensions.tensor import regions, sharded_tensors
from tfdist.sharding.sharded_activations import ActivationShard


@keras.saving.register_keras_serializable("tfdist")
class VocabParallelCrossentropy(keras.losses.Loss):
    """`keras.losses.SparseCategoricalCrossentropy` that never gathers the logits of the whole vocabulary.

    It takes the output of `ColumnParallelDense(vocabulary, gather_output=False)`, or of a `VocabParallelReversibleEmbedding` in
    reverse, sharded as it is. It moves 3 numbers a position (and one more with `label_smoothing`), times the 2 (t - 1) / t of an
    all-reduce, whatever the vocabulary; gathered logits would be vocabulary numbers a position. It takes whole predictions too.

    Args:
        from_logits: whether predictions are logits; else probabilities.
        ignore_class: a label that does not count, such as -1; None: all count.
        label_smoothing: in [0, 1): so much of the label's weight is spread evenly over all classes.
        reduction, name, dtype: as of Keras losses.

    Call arguments:
        y_true: integers, (batch, ...) or (batch, ..., 1).
        y_pred: (batch, ..., classes), sharded along its last axis or whole.

    Raises:
        ValueError: `label_smoothing` is out of range, or `y_true` is one-hot.

    Source: Megatron-LM, Shoeybi et al. 2019; label smoothing of Szegedy et al. 2016.
    """

    _takes_sharded_predictions = True  # as they are; other losses get them gathered

    def __init__(
        self,
        from_logits: bool = False,
        ignore_class: int | None = None,
        label_smoothing: float = 0.0,
        reduction: str | None = "sum_over_batch_size",
        name: str = "vocab_parallel_crossentropy",
        dtype: Any = None,
    ):
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        if not 0 <= label_smoothing < 1:
            raise errors.value_error("`label_smoothing` must be in [0, 1).", label_smoothing=label_smoothing)
        self.from_logits = from_logits
        self.ignore_class = ignore_class
        self.label_smoothing = label_smoothing

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        # Keras converts predictions before `call`, and a converted tensor has no mark.
        self._shard = sharded_tensors.shard_of(y_pred)
        return super().__call__(y_true, y_pred, sample_weight)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        shard, self._shard = self._shard, None
        logits = tf.convert_to_tensor(y_pred)
        labels = self._labels(y_true, logits)
        if not self.from_logits:
            epsilon = keras.config.epsilon()
            logits = tf.math.log(tf.clip_by_value(logits, epsilon, 1 - epsilon))
        if self.ignore_class is None:
            return self._losses(labels, logits, shard)
        is_valid = tf.not_equal(labels, self.ignore_class)
        losses = self._losses(tf.where(is_valid, labels, tf.zeros_like(labels)), logits, shard)
        losses = tf.where(is_valid, losses, tf.zeros_like(losses))
        losses._keras_mask = is_valid  # as Keras: the mean is over what counts
        return losses

    def _labels(self, y_true: Any, logits: tf.Tensor) -> tf.Tensor:
        labels = tf.convert_to_tensor(y_true)
        if labels.shape.rank == logits.shape.rank:
            if labels.shape[-1] != 1:
                raise errors.value_error(
                    "`y_true` must hold class numbers, of the shape of `y_pred` without its last axis.",
                    y_true=tuple(labels.shape),
                    y_pred=tuple(logits.shape),
                    fix="Turn one-hot labels into numbers with `keras.ops.argmax(y_true, axis=-1)`.",
                )
            labels = tf.squeeze(labels, -1)
        return tf.cast(labels, tf.int64)

    def _losses(self, labels: tf.Tensor, logits: tf.Tensor, shard: ActivationShard | None) -> tf.Tensor:
        """Returns the loss of each position, labels (batch, ...), logits (batch, ..., classes), whole or sharded."""
        local = logits.shape[-1]
        classes, start = (local, 0) if shard is None else (shard.size, regions.tensor_rank() * local)
        counted = max(0, min(local, classes - start))
        if counted < local:  # the padding of a vocabulary
            logits = tf.where(tf.range(local) < counted, logits, tf.constant(-math.inf, logits.dtype))
        shift = tf.stop_gradient(tf.reduce_max(logits, -1))
        if shard is not None:
            program = regions.tensor_program()
            shift = tf.stop_gradient(activations.all_reduce(program, shift, "tensor", f"{self.name}/maximum", reduce_op="max"))
        is_here = (labels >= start) & (labels < start + counted)
        places = tf.where(is_here, labels - start, tf.zeros_like(labels))
        flat = (tf.reshape(logits, [-1, local]), tf.reshape(shift, [-1]), tf.reshape(places, [-1]))
        sum_here, of_label = (tf.reshape(x, tf.shape(labels)) for x in _exponential_sums(*flat))
        sums = [sum_here, tf.where(is_here, of_label, tf.zeros_like(of_label))]
        if self.label_smoothing:
            sums.append(tf.reduce_sum(logits[..., :counted], -1) - counted * shift)
        packed = tf.stack(sums, -1)  # (batch, ..., 2 or 3)
        if shard is not None:
            packed = regions.reduce_from(packed, f"{self.name}/sums")
        total, of_label, *of_all = tf.unstack(packed, axis=-1)
        target = of_label
        if self.label_smoothing:
            target = (1 - self.label_smoothing) * of_label + self.label_smoothing / classes * of_all[0]
        losses = tf.math.log(total) - target
        # A label that no rank has is a mistake in the data: not a number, as TensorFlow has it.
        is_known = (labels >= 0) & (labels < classes)
        return tf.where(is_known, losses, tf.constant(float("nan"), losses.dtype))

    def get_config(self) -> dict[str, Any]:
        names = ("from_logits", "ignore_class", "label_smoothing")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


@custom_gradient
def _exponential_sums(
    logits: tf.Tensor, shift: tf.Tensor, labels: tf.Tensor
) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., Any]]:
    """Returns the sum of exp(logits - shift) of each position, and the label's logit less the shift, which counts as constant.

    Logits are (positions, classes), and one tensor of that size is kept for the gradient; all else is (positions,).
    """
    shifted = logits - shift[:, tf.newaxis]
    of_label = tf.gather(shifted, labels, batch_dims=1)
    exponentials = tf.exp(shifted)

    def gradient(of_sum: tf.Tensor, of_label: tf.Tensor) -> tuple[tf.Tensor, None, None]:
        places = tf.stack([tf.range(tf.size(labels, out_type=labels.dtype)), labels], -1)
        return tf.tensor_scatter_nd_add(exponentials * of_sum[:, tf.newaxis], places, of_label), None, None

    return (tf.reduce_sum(exponentials, -1), of_label), gradient
