"""`EinsumDense` over the ranks of a tensor group, sharded by column or by row as `Dense` is in `parallel_dense`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfdist import errors
from tfdist.layers import regions
from tfdist.layers.einsum_axes import COLUMN, ROW, ShardedAxes, einsum_axes, einsum_label
from tfdist.layers.parallel_dense import check_column_output, check_row_input, column_output
from tfdist.layers.sharded_weights import ShardedWeights, check_divisible, check_is_sharded, local
from tfdist.sharding import Shard


class _ParallelEinsumDense(ShardedWeights):
    _role: str

    def _axes(self) -> ShardedAxes:
        if einsum_label(self, self._role) is None:
            raise errors.value_error(
                f"`equation` of layer {self.name!r} has no label to shard by {self._role}: one that is in the kernel and, of "
                f"input and output, in the {'output' if self._role == COLUMN else 'input'} only.",
                equation=self.equation,
            )
        return einsum_axes(self, self._role)

    def _shards(self) -> Mapping[str, Shard]:
        axes = self._axes()
        bias = {} if axes.bias is None else {"bias": Shard(axes.bias)}
        return {"_kernel": Shard(axes.kernel), **bias}

    def build(self, input_shape: Any) -> None:
        self._axes()
        super().build(input_shape)

    def shard_weights(self) -> None:
        parts = regions.scope_tensor_size()
        check_divisible(f"axis {einsum_label(self, self._role)}", self._kernel.shape[self._axes().kernel], parts, self.name)
        super().shard_weights()


@keras.saving.register_keras_serializable("tfdist")
class ColumnParallelEinsumDense(_ParallelEinsumDense, keras.layers.EinsumDense):
    """`keras.layers.EinsumDense`, sharded along a label that only kernel and output have; see `ColumnParallelDense`.

    Args:
        equation: of `EinsumDense`; the first label of the kernel that is in the output and not in the input is sharded.
        output_shape: as of `EinsumDense`.
        gather_output: True returns the whole output on every rank, False this rank's part.
        **kwargs: as of `keras.layers.EinsumDense`.

    Raises:
        ValueError: when built: no label can be sharded, or the tensor size does not divide its size.
    """

    _role = COLUMN

    def __init__(self, equation: str, output_shape: Any, gather_output: bool = True, **kwargs: Any):
        super().__init__(equation, output_shape, **kwargs)
        self.gather_output = gather_output
        check_column_output(self)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if regions.tensor_program() is None:
            return super().call(inputs)
        check_is_sharded(self, self._kernel)
        axes = self._axes()
        x = keras.ops.einsum(self.equation, self._entered(inputs), local(self.kernel))
        if self.bias is not None:
            x = keras.ops.add(x, local(self.bias))
        return column_output(self, x, axes.outputs, self._kernel.shape[axes.kernel])

    def _entered(self, inputs: Any) -> Any:
        return regions.copy_to(inputs, f"{self.name}/copy_to")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "gather_output": self.gather_output}


@keras.saving.register_keras_serializable("tfdist")
class RowParallelEinsumDense(_ParallelEinsumDense, keras.layers.EinsumDense):
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

    _role = ROW
    sequence_parallel = False  # True in an attention whose output is sharded along the sequence

    def __init__(self, equation: str, output_shape: Any, input_is_parallel: bool = False, **kwargs: Any):
        super().__init__(equation, output_shape, **kwargs)
        self.input_is_parallel = input_is_parallel

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if regions.tensor_program() is None:
            return super().call(inputs)
        check_is_sharded(self, self._kernel)
        axes = self._axes()
        x = inputs
        if not self.input_is_parallel:
            x = regions.scatter_to(inputs, axes.inputs, f"{self.name}/scatter_to")
        check_row_input(self, x, axes.inputs, self._kernel.shape[axes.kernel])
        x = keras.ops.einsum(self.equation, x, local(self.kernel))
        x, bias = regions.leave_region(x, self.bias, self.sequence_parallel, self.name)
        if bias is not None:
            x = keras.ops.add(x, bias)
        return x if self.activation is None else self.activation(x)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "input_is_parallel": self.input_is_parallel}
