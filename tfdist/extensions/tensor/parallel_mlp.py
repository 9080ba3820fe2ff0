"""The feed-forward network of a transformer, sharded over the tensor ranks.

    plain    Y = f(X A) B + b                   A by columns, B by rows: rank i computes f(X A_i) B_i
    gated    Y = (f(X G) * (X A)) B + b         G and A by columns

One all-reduce forward, of the output, and one backward, of the input's gradient.
"""

from typing import Any

import keras

from tfdist import errors
from tfdist.extensions.tensor import regions
from tfdist.extensions.tensor.parallel_dense import ColumnParallelDense, RowParallelDense
from tfdist.keras_layers.randomness import sharded_region


@keras.saving.register_keras_serializable("tfdist")
class ParallelMLP(keras.layers.Layer):
    """Dense, activation, dense: column-parallel, then row-parallel, without communication between the two.

    Outside replicas, and where the strategy has no tensor axis, it is those Keras layers.

    Args:
        hidden_units: features between the two; a multiple of the tensor size.
        units: output features; None: as many as the input has.
        activation: one that looks at single elements, such as "gelu", "relu" or "silu".
        gated: True multiplies the activation with a second projection of the input: "silu" makes it SwiGLU, "gelu" GeGLU.
        dropout: rate on the hidden features; every tensor rank drops of its own.
        use_bias: whether the projections have biases.
        sequence_parallel: as of `ParallelMultiHeadAttention`.
        kernel_initializer: of all kernels.

    Input shape:
        (batch, ..., in).

    Output shape:
        (batch, ..., units).

    Raises:
        ValueError: the activation needs the whole of the hidden features; when built: the tensor size does not divide
            `hidden_units`.

    Source: Megatron-LM, Shoeybi et al. 2019; gated variants of Shazeer 2020.
    """

    def __init__(
        self,
        hidden_units: int,
        units: int | None = None,
        activation: Any = "gelu",
        gated: bool = False,
        dropout: float = 0.0,
        use_bias: bool = True,
        sequence_parallel: bool = False,
        kernel_initializer: Any = "glorot_uniform",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.hidden_units = hidden_units
        self.units = units
        self.activation = keras.activations.get(activation)
        self.gated = gated
        self.dropout = dropout
        self.use_bias = use_bias
        self.sequence_parallel = sequence_parallel
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        if units is not None and (not isinstance(units, int) or units < 1):
            raise errors.value_error("`units` must be a positive integer or None.", units=units)
        self._up = self._inner("up", None if gated else self.activation)
        self._gate = self._inner("gate", self.activation) if gated else None
        self._dropout = keras.layers.Dropout(dropout, dtype=self.dtype_policy) if dropout else None
        self._down: RowParallelDense | None = None

    def _inner(self, name: str, activation: Any) -> ColumnParallelDense:
        layer = ColumnParallelDense(self.hidden_units, activation, gather_output=False, name=name, **self._common())
        layer.input_has_entered = True  # once, for both
        return layer

    def _common(self) -> dict[str, Any]:
        clone = self.kernel_initializer.clone()  # an initializer draws the same each time
        return {"use_bias": self.use_bias, "kernel_initializer": clone, "dtype": self.dtype_policy}

    def build(self, input_shape: Any) -> None:
        units = self.units or input_shape[-1]
        self._down = RowParallelDense(units, input_is_parallel=True, name="down", **self._common())
        self._down.sequence_parallel = self.sequence_parallel
        self._up.build(input_shape)
        if self._gate is not None:
            self._gate.build(input_shape)
        self._down.build((*input_shape[:-1], self.hidden_units))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        x = regions.enter_region(inputs, self.sequence_parallel, self.name)
        hidden = self._up(x)
        if self._gate is not None:
            hidden = keras.ops.multiply(self._gate(x), hidden)
        if self._dropout is not None:
            with sharded_region():
                hidden = self._dropout(hidden, training=training)
        return self._down(hidden)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (*input_shape[:-1], self.units or input_shape[-1])

    def get_config(self) -> dict[str, Any]:
        names = "hidden_units units gated dropout use_bias sequence_parallel"
        return {
            **super().get_config(),
            **{name: getattr(self, name) for name in names.split()},
            "activation": keras.activations.serialize(self.activation),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }
