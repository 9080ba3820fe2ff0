"""`Dense` over the ranks of a tensor group, sharded by columns or by rows of its kernel.

    Y = X A + b

    column    A = [A_1 ... A_t]           rank i: Y_i = X A_i + b_i           X whole, Y sharded along its last axis
    row       A = [A_1; ...; A_t]         rank i: X_i A_i,  Y = sum + b       X sharded along its last axis, Y whole

A column-parallel layer followed by a row-parallel one needs no communication between the two.
"""

from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.extensions.tensor import regions
from tfdist.extensions.tensor.einsum_axes import COLUMN, ROW, sharded_axes
from tfdist.extensions.tensor.elementwise import is_elementwise_activation
from tfdist.extensions.tensor.lora_factors import KERNEL
from tfdist.extensions.tensor.sharded_weights import ShardedWeights, check_divisible, check_is_sharded
from tfdist.sharding import Shard
from tfdist.sharding.sharded_activations import ActivationShard, mark_shard


class _ParallelProduct(ShardedWeights):
    """A Dense, EinsumDense or Conv2D that is sharded by column or by row."""

    _role: str
    _divided: Any  # what the size of the sharded axis is called
    _factored = KERNEL

    @property
    def kernel(self) -> Any:
        """The kernel, with LoRA the product of its factors added; inside a replica this rank's part of that."""
        is_here = getattr(self, "lora_enabled", False) and regions.tensor_program() is not None
        return KERNEL.merged(self) if is_here else super().kernel

    @classmethod
    def _shards(cls, layer: Any) -> dict[str, Shard]:
        axes = sharded_axes(layer, cls._role)
        return {"_kernel": Shard(axes.kernel)} | ({} if axes.bias is None else {"bias": Shard(axes.bias)})

    def shard_weights(self) -> None:
        size = self._kernel.shape[sharded_axes(self, self._role).kernel]
        check_divisible(self._divided, size, regions.scope_tensor_size(), self.name)
        super().shard_weights()

    def _product(self, inputs: Any, kernel: tf.Tensor) -> tf.Tensor:
        return keras.ops.matmul(inputs, kernel)

    def _add_bias(self, x: tf.Tensor, bias: Any) -> tf.Tensor:
        return keras.ops.add(x, bias)


class ColumnParallel(_ParallelProduct):
    """A Dense, EinsumDense or Conv2D that is sharded by column."""

    _role = COLUMN
    input_has_entered = False  # True where the layer around it has taken the input into the region

    def __init__(self, *args: Any, gather_output: bool, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.gather_output = gather_output
        if gather_output:
            return
        if not is_elementwise_activation(self.activation):
            raise errors.value_error(
                f"`activation` of layer {self.name!r} is not known to look at one element at a time, and with "
                "`gather_output=False` each rank has a part of the output only.",
                activation=getattr(self.activation, "__name__", self.activation),
                fix="Use `gather_output=True`, or an elementwise activation of `keras.activations`.",
            )
        if self.activity_regularizer is not None:
            raise errors.not_implemented(
                f"`activity_regularizer` of layer {self.name!r} would see a part of the output only.",
                activity_regularizer=self.activity_regularizer,
                fix="Use `gather_output=True`.",
            )

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if regions.tensor_program() is None:
            return super().call(inputs)
        check_is_sharded(self, self._kernel)
        x = inputs if self.input_has_entered else regions.copy_to(inputs, f"{self.name}/copy_to")
        # Tensors: Keras's operations look at the shape (`add` may become a `BiasAdd`), and a Keras variable's is global.
        x = self._product(x, tf.convert_to_tensor(self.kernel))
        if self.bias is not None:
            x = self._add_bias(x, tf.convert_to_tensor(self.bias))
        activation = self.activation or keras.activations.linear
        if not self.gather_output:
            return mark_shard(activation(x), self.output_shard)
        axis, label = sharded_axes(self, COLUMN).outputs, f"{self.name}/gather_output"
        if is_elementwise_activation(self.activation):
            return regions.gather_from(activation(x), axis, label)
        return activation(regions.gather_from(x, axis, label))

    @property
    def output_shard(self) -> ActivationShard | None:
        """How the output is sharded inside replicas; None: it is whole."""
        if self.gather_output:
            return None
        axes = sharded_axes(self, COLUMN)
        return ActivationShard(axes.outputs, self._kernel.shape[axes.kernel])

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "gather_output": self.gather_output}


class RowParallel(_ParallelProduct):
    """A Dense, EinsumDense or Conv2D that is sharded by row."""

    _role = ROW
    sequence_parallel = False  # True in an attention or MLP whose output is sharded along the sequence

    def __init__(self, *args: Any, input_is_parallel: bool, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.input_is_parallel = input_is_parallel

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if regions.tensor_program() is None:
            return super().call(inputs)
        check_is_sharded(self, self._kernel)
        axes = sharded_axes(self, ROW)
        x = inputs if self.input_is_parallel else regions.scatter_to(inputs, axes.inputs, f"{self.name}/scatter_to")
        self._check_input(x, axes.inputs, self._kernel.shape[axes.kernel])
        x = self._product(x, tf.convert_to_tensor(self.kernel))
        x, bias = regions.leave_region(x, self.bias, self.sequence_parallel, self.name)
        if bias is not None:
            x = self._add_bias(x, bias)
        return x if self.activation is None else self.activation(x)

    def shard_weights(self) -> None:
        super().shard_weights()
        if self.input_spec is not None:
            self.input_spec.axes = {}  # inside a replica there are fewer features

    def _check_input(self, x: tf.Tensor, axis: int, size: int) -> None:
        """Raises ValueError when the input is not this rank's part of an axis of `size`."""
        part = size // regions.tensor_program().mesh.tensor_parallel_size
        if x.shape[axis] == part:
            return
        is_whole = x.shape[axis] == size
        raise errors.value_error(
            f"Layer {self.name!r} with `input_is_parallel={self.input_is_parallel}` computes on {part} of {size} input "
            "features, one part a tensor rank.",
            shape=tuple(x.shape),
            fix="The input is whole: use `input_is_parallel=False`, or `gather_output=False` in the layer before."
            if is_whole
            else "The input must come from a layer with `gather_output=False`, by way of elementwise layers only.",
        )

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "input_is_parallel": self.input_is_parallel}


@keras.saving.register_keras_serializable("tfdist")
class ColumnParallelDense(ColumnParallel, keras.layers.Dense):
    """`keras.layers.Dense` whose output features are computed by different tensor ranks (Megatron's column-parallel linear).

    Kernel and bias are sharded along the output; each rank stores and computes 1/t of them. Forward it sends nothing, or, with
    `gather_output`, all-gathers the output; backward it all-reduces the gradient of its input.

    Outside replicas, and where the strategy has no tensor axis, it is `keras.layers.Dense`: same weights, same shapes, same
    checkpoints.

    The mistake to avoid: `gather_output=False` before a layer that wants the whole output. A `RowParallelDense` with
    `input_is_parallel=True`, elementwise layers, and `VocabParallelCrossentropy` take the part.

    Args:
        units: output features; a multiple of the tensor size.
        activation: as of `Dense`. Without `gather_output` one that looks at single elements; softmax is none.
        gather_output: True returns the whole output on every rank, False this rank's part.
        **kwargs: as of `keras.layers.Dense`, without `quantization_config`.

    Input shape:
        (batch, ..., in), whole.

    Output shape:
        (batch, ..., units); with `gather_output=False`, inside a replica, (batch, ..., units / t).

    Raises:
        ValueError: when built: the tensor size does not divide `units`; or the activation needs the whole output.
        NotImplementedError: an `activity_regularizer` with `gather_output=False`; quantization.

    Source: Megatron-LM, Shoeybi et al. 2019.
    """

    _divided = "units"

    def __init__(self, units: int, activation: Any = None, gather_output: bool = True, **kwargs: Any):
        super().__init__(units, activation, gather_output=gather_output, **kwargs)


@keras.saving.register_keras_serializable("tfdist")
class RowParallelDense(RowParallel, keras.layers.Dense):
    """`keras.layers.Dense` whose input features are summed over by different tensor ranks (Megatron's row-parallel linear).

    The kernel is sharded along the input, the bias is whole. Forward it all-reduces the output; backward it sends nothing, or,
    with a whole input, all-gathers its gradient.

    Outside replicas, and where the strategy has no tensor axis, it is `keras.layers.Dense`.

    Args:
        units: output features.
        activation: as of `Dense`.
        input_is_parallel: False takes a whole input, of which each rank uses its part; True takes the part that a layer with
            `gather_output=False` returned.
        **kwargs: as of `keras.layers.Dense`, without `quantization_config`.

    Input shape:
        (batch, ..., in); with `input_is_parallel`, inside a replica, (batch, ..., in / t). `in` is a multiple of the tensor size.

    Output shape:
        (batch, ..., units), whole.

    Raises:
        ValueError: when built: the tensor size does not divide the input size; while tracing: `input_is_parallel=True` and a
            whole input, or the reverse.

    Source: Megatron-LM, Shoeybi et al. 2019.
    """

    _divided = "input size"

    def __init__(self, units: int, activation: Any = None, input_is_parallel: bool = False, **kwargs: Any):
        super().__init__(units, activation, input_is_parallel=input_is_parallel, **kwargs)
