"""`Conv2D` over the ranks of a tensor group, sharded by its output channels or by its input channels.

    Y = X * K + b,  Y_c = sum over input channels d of X_d * K_dc

column    K by output channels      rank i: Y_i = X * K_i + b_i        X whole, Y sharded along its channels
row       K by input channels       rank i: X_i * K_i,  Y = sum + b    X sharded along its channels, Y whole

Between the two stands what treats each channel by itself: activations, pooling, `ChannelParallelBatchNormalization`.
"""

from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.extensions.tensor.parallel_dense import ColumnParallel, RowParallel
from tfdist.extensions.tensor.sharded_weights import ShardedWeights


class _ParallelConv(ShardedWeights):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.groups != 1:
            raise errors.not_implemented(
                f"Layer {self.name!r} convolves its channels in groups, and is not sharded over the tensor ranks.",
                groups=self.groups,
                fix="Use `keras.layers.Conv2D`.",
            )

    def _product(self, inputs: Any, kernel: tf.Tensor) -> tf.Tensor:
        return self.convolution_op(inputs, kernel)

    def _add_bias(self, x: tf.Tensor, bias: Any) -> tf.Tensor:
        shape = (1, 1, 1, -1) if self.data_format == "channels_last" else (1, -1, 1, 1)
        return keras.ops.add(x, tf.reshape(bias, shape))


@keras.saving.register_keras_serializable("tfdist")
class ColumnParallelConv2D(_ParallelConv, ColumnParallel, keras.layers.Conv2D):
    """`keras.layers.Conv2D` whose output channels are computed by different tensor ranks; see `ColumnParallelDense`.

    Args:
        filters: output channels; a multiple of the tensor size.
        kernel_size: as of `Conv2D`.
        gather_output: True returns all channels on every rank, False this rank's.
        **kwargs: as of `keras.layers.Conv2D`.

    Input shape:
        as of `Conv2D`, whole.

    Output shape:
        as of `Conv2D`; with `gather_output=False`, inside a replica, filters / t channels.

    Raises:
        ValueError: when built: the tensor size does not divide `filters`; or the activation needs the whole output.
        NotImplementedError: `groups` above 1; an `activity_regularizer` with `gather_output=False`.
    """

    _divided = "filters"

    def __init__(self, filters: int, kernel_size: Any, gather_output: bool = True, **kwargs: Any):
        super().__init__(filters, kernel_size, gather_output=gather_output, **kwargs)


@keras.saving.register_keras_serializable("tfdist")
class RowParallelConv2D(_ParallelConv, RowParallel, keras.layers.Conv2D):
    """`keras.layers.Conv2D` whose input channels are summed over by different tensor ranks; see `RowParallelDense`.

    Args:
        filters: output channels.
        kernel_size: as of `Conv2D`.
        input_is_parallel: False takes a whole input, of which each rank uses its channels; True takes the channels that a layer
            with `gather_output=False` returned.
        **kwargs: as of `keras.layers.Conv2D`.

    Input shape:
        as of `Conv2D`; with `input_is_parallel`, inside a replica, 1/t of the channels.

    Output shape:
        as of `Conv2D`, whole.

    Raises:
        ValueError: when built: the tensor size does not divide the input channels; while tracing: `input_is_parallel=True` and a
            whole input, or the reverse.
        NotImplementedError: `groups` above 1.
    """

    _divided = "input channels"

    def __init__(self, filters: int, kernel_size: Any, input_is_parallel: bool = False, **kwargs: Any):
        super().__init__(filters, kernel_size, input_is_parallel=input_is_parallel, **kwargs)
