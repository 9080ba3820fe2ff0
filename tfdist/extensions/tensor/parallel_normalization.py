"""`BatchNormalization` of channels that are sharded over the tensor ranks: each rank normalizes its own, and sends nothing.

    whole X -> conv, column -> Y_i -> normalization of the channels i -> activation -> conv, row -> sum over the ranks

The statistics of a channel are those of its own elements, so that a rank needs no other's. Over the data ranks they are shared as
those of the Keras layer are (`normalization`, `statistics`).
"""

from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.extensions.tensor import regions
from tfdist.extensions.tensor.sharded_weights import ShardedWeights, check_divisible, check_is_sharded
from tfdist.keras_layers.statistics import note_assigned
from tfdist.sharding import Shard
from tfdist.sharding.sharded_activations import ActivationShard, mark_shard


@keras.saving.register_keras_serializable("tfdist")
class ChannelParallelBatchNormalization(ShardedWeights, keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` between two sharded layers: scale, offset and statistics of this rank's channels.

    Outside replicas, and where the strategy has no tensor axis, it is `keras.layers.BatchNormalization`.

    Args:
        **kwargs: as of `keras.layers.BatchNormalization`, without `renorm`.

    Input shape:
        (batch, ...), sharded along the axis of the channels: what a layer with `gather_output=False` returned, or what
        elementwise layers and poolings made of it. The number of channels is a multiple of the tensor size.

    Output shape:
        as the input, sharded too.

    Raises:
        ValueError: when built: the tensor size does not divide the channels; while tracing: the input is whole.
        NotImplementedError: `renorm=True`.
    """

    def _check_sizes(self, input_shape: Any, parts: int) -> None:
        if self.renorm:
            raise errors.not_implemented(
                f"Layer {self.name!r} renormalizes batches, and is not sharded over the tensor ranks.",
                renorm=self.renorm,
                fix="Use `keras.layers.BatchNormalization`.",
            )
        check_divisible("channels", input_shape[self.axis], parts, self.name)

    @classmethod
    def _shards(cls, layer: Any) -> dict[str, Shard]:
        return dict.fromkeys(("gamma", "beta", "moving_mean", "moving_variance"), Shard(0))

    def shard_weights(self) -> None:
        super().shard_weights()
        self.input_spec = None  # inside a replica there are fewer channels

    @property
    def output_shard(self) -> ActivationShard | None:
        """How the output is sharded inside replicas."""
        return ActivationShard(self.axis, self.moving_mean.shape[0])

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if regions.tensor_program() is None:
            return super().call(inputs, training=training, mask=mask)
        check_is_sharded(self, self.moving_mean)
        moving_mean, moving_variance = map(tf.convert_to_tensor, (self.moving_mean, self.moving_variance))
        if inputs.shape[self.axis] != moving_mean.shape[0]:
            channels = f"{moving_mean.shape[0]} of {self.moving_mean.shape[0]} channels"
            raise errors.value_error(
                f"Layer {self.name!r} normalizes {channels}, one part a tensor rank.",
                shape=tuple(inputs.shape),
                fix="Its input must come from a layer with `gather_output=False`, by way of elementwise layers and poolings.",
            )
        x = keras.ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        moving_mean, moving_variance = keras.ops.cast(moving_mean, x.dtype), keras.ops.cast(moving_variance, x.dtype)
        mean, variance = moving_mean, moving_variance
        if training and self.trainable:
            mean, variance = self._moments(x, mask)
            self._follow(self.moving_mean, moving_mean, mean)
            self._follow(self.moving_variance, moving_variance, variance)
        outputs = keras.ops.batch_normalization(
            x,
            mean,
            variance,
            axis=self.axis,
            offset=keras.ops.cast(tf.convert_to_tensor(self.beta), x.dtype) if self.center else None,
            scale=keras.ops.cast(tf.convert_to_tensor(self.gamma), x.dtype) if self.scale else None,
            epsilon=self.epsilon,
        )
        return mark_shard(keras.ops.cast(outputs, self.compute_dtype), self.output_shard)

    def _follow(self, variable: keras.Variable, moving: Any, value: Any) -> None:
        """Moves a statistic of this rank's channels towards that of the batch. `Variable.assign` would want all channels."""
        variable._value.assign(keras.ops.cast(moving * self.momentum + value * (1.0 - self.momentum), variable.dtype))
        note_assigned(variable._value)
