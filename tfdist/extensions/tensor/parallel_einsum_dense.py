"""`EinsumDense` over the ranks of a tensor group, sharded by column or by row as `Dense` is in `parallel_dense`."""

from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.extensions.tensor.einsum_axes import COLUMN, einsum_label
from tfdist.extensions.tensor.parallel_dense import ColumnParallel, RowParallel
from tfdist.extensions.tensor.sharded_weights import ShardedWeights


class _ParallelEinsumDense(ShardedWeights):
    def build(self, input_shape: Any) -> None:
        if einsum_label(self, self._role) is None:
            raise errors.value_error(
                f"`equation` of layer {self.name!r} has no label to shard by {self._role}: one that is in the kernel and, of "
                f"input and output, in the {'output' if self._role == COLUMN else 'input'} only.",
                equation=self.equation,
            )
        super().build(input_shape)

    @property
    def _divided(self) -> str:
        return f"axis {einsum_label(self, self._role)}"

    def _product(self, inputs: Any, kernel: tf.Tensor) -> tf.Tensor:
        return keras.ops.einsum(self.equation, inputs, kernel)


@keras.saving.register_keras_serializable("tfdist")
class ColumnParallelEinsumDense(_ParallelEinsumDense, ColumnParallel, keras.layers.EinsumDense):
    """`keras.layers.EinsumDense`, sharded along a label that only kernel and output have; see `ColumnParallelDense`.

    Args:
        equation: of `EinsumDense`; the first label of the kernel that is in the output and not in the input is sharded.
        output_shape: as of `EinsumDense`.
        gather_output: True returns the whole output on every rank, False this rank's part.
        **kwargs: as of `keras.layers.EinsumDense`.

    Raises:
        ValueError: when built: no label can be sharded, or the tensor size does not divide its size.
    """

    def __init__(self, equation: str, output_shape: Any, gather_output: bool = True, **kwargs: Any):
        super().__init__(equation, output_shape, gather_output=gather_output, **kwargs)


@keras.saving.register_keras_serializable("tfdist")
class RowParallelEinsumDense(_ParallelEinsumDense, RowParallel, keras.layers.EinsumDense):
    """`keras.layers.EinsumDense`, sharded along a label that is summed over; see `RowParallelDense`.

    Args:
        equation: of `EinsumDense`; the first label of the kernel that is in the input and not in the output is sharded.
        output_shape: as of `EinsumDense`.
        input_is_parallel: False takes a whole input, True the part that a layer with `gather_output=False` returned.
        **kwargs: as of `keras.layers.EinsumDense`.

    Raises:
        ValueError: when built: no label can be sharded, or the tensor size does not divide its size; while tracing:
            `input_is_parallel=True` and a whole input, or the reverse.
    """

    def __init__(self, equation: str, output_shape: Any, input_is_parallel: bool = False, **kwargs: Any):
        super().__init__(equation, output_shape, input_is_parallel=input_is_parallel, **kwargs)
