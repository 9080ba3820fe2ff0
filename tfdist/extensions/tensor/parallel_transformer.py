"""A transformer block over the tensor ranks, plain or sequence-parallel.

    plain                 x ── norm ── [ attention ] ── + ── norm ── [ MLP ] ── +       [ ] heads, hidden features sharded
                          whole                         whole                   whole

    sequence_parallel     x ── norm ── [ attention ] ── + ── norm ── [ MLP ] ── +
                          sharded      gather  scatter  sharded      gather  scatter    sharded: along the sequence

Both send the same bytes: an all-reduce is a reduce-scatter and an all-gather. Sequence parallelism holds norms, dropouts and
residuals of 1/t of the positions on each rank.
"""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.extensions.tensor import regions
from tfdist.extensions.tensor.parallel_attention import ParallelGroupedQueryAttention, ParallelMultiHeadAttention, entered_norm
from tfdist.extensions.tensor.parallel_mlp import ParallelMLP
from tfdist.keras_layers.randomness import sharded_region
from tfdist.sharding.sharded_activations import ActivationShard, copy_mask, mark_shard

# Note: weights on sharded sequences. A norm's weights are whole, but of positions that a rank has not it sees no gradient: they
# enter as into a region, so that their gradients are summed over the tensor ranks, in one message a norm.


class _LayerNormalization(keras.layers.LayerNormalization):
    """Layer normalization of a part of the sequence."""

    def call(self, inputs: Any) -> Any:
        if regions.tensor_program() is None:
            return super().call(inputs)
        weights = tf.stack([tf.convert_to_tensor(self.gamma), tf.convert_to_tensor(self.beta)])
        gamma, beta = tf.unstack(regions.copy_to(weights, f"{self.name}/weights"))
        return keras.ops.layer_normalization(inputs, gamma, beta, axis=self.axis, epsilon=self.epsilon)


# Of whole sequences, and of sharded ones.
_NORMALIZATIONS = {
    "layer": (keras.layers.LayerNormalization, _LayerNormalization),
    "rms": (keras.layers.RMSNormalization, entered_norm(keras.layers.RMSNormalization)),
}


@keras.saving.register_keras_serializable("tfdist")
class ParallelTransformerBlock(keras.layers.Layer):
    """A pre-normalization transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    Attention is sharded by heads and the MLP by hidden features: two all-reduces forward and two backward. Outside replicas, and
    where the strategy has no tensor axis, it is the Keras layers that it is made of.

    With `sequence_parallel` what lies between is sharded along the sequence. A stack of blocks stays sharded from its first to
    its last:

        blocks = [
            ParallelTransformerBlock(..., sequence_parallel=True, input_is_parallel=i > 0, gather_output=i == n - 1)
            for i in range(n)
        ]

    The mistake to avoid: leaving both at their defaults in every block of a stack. It is right, and gathers and shards between
    blocks.

    Args:
        num_heads: query heads; a multiple of the tensor size.
        hidden_units: hidden features of the MLP; a multiple of the tensor size.
        key_dim: size of each head; None: input features / num_heads.
        num_key_value_heads: heads of keys and values (grouped-query attention); None: as many as `num_heads`.
        activation: of the MLP.
        gated: whether the MLP is gated ("silu": SwiGLU, "gelu": GeGLU).
        dropout: rate after attention and MLP, on the residual path.
        attention_dropout: rate on the attention's probabilities.
        normalization: "layer" or "rms".
        epsilon: of the normalizations.
        use_bias: whether projections have biases.
        use_causal_mask: whether a position sees itself and those before it only.
        sequence_parallel: whether norms, dropouts and residuals are sharded along the sequence; its length must be a multiple of
            the tensor size.
        input_is_parallel: with `sequence_parallel`: the input is sharded along the sequence already.
        gather_output: with `sequence_parallel`: True returns the whole sequence on every rank, False this rank's part.
        kernel_initializer: of all kernels.

    Input shape:
        (batch, sequence, features); with `input_is_parallel`, inside a replica, (batch, sequence / t, features).

    Output shape:
        as the input; with `gather_output=False`, inside a replica, (batch, sequence / t, features).

    Raises:
        ValueError: an unknown `normalization`, `input_is_parallel` or `gather_output=False` without `sequence_parallel`, or
            `num_heads` does not divide the features; when built: the tensor size does not divide heads or hidden units.

    Source: Megatron-LM, Shoeybi et al. 2019; sequence parallelism of Korthikanti et al. 2022.
    """

    def __init__(
        self,
        num_heads: int,
        hidden_units: int,
        key_dim: int | None = None,
        num_key_value_heads: int | None = None,
        activation: Any = "gelu",
        gated: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        normalization: str = "layer",
        epsilon: float = 1e-5,
        use_bias: bool = True,
        use_causal_mask: bool = True,
        sequence_parallel: bool = False,
        input_is_parallel: bool = False,
        gather_output: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if normalization not in _NORMALIZATIONS:
            raise errors.value_error('`normalization` must be "layer" or "rms".', normalization=normalization)
        if not sequence_parallel and (input_is_parallel or not gather_output):
            raise errors.value_error(
                "`input_is_parallel=True` and `gather_output=False` need `sequence_parallel=True`.",
                input_is_parallel=input_is_parallel,
                gather_output=gather_output,
                fix="Without it the activations between blocks are whole.",
            )
        self.supports_masking = True
        self.num_heads = num_heads
        self.hidden_units = hidden_units
        self.key_dim = key_dim
        self.num_key_value_heads = num_key_value_heads
        self.activation = keras.activations.get(activation)
        self.gated = gated
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.normalization = normalization
        self.epsilon = epsilon
        self.use_bias = use_bias
        self.use_causal_mask = use_causal_mask
        self.sequence_parallel = sequence_parallel
        self.input_is_parallel = input_is_parallel
        self.gather_output = gather_output
        self.kernel_initializer = keras.initializers.get(kernel_initializer)

    def build(self, input_shape: Any) -> None:
        features = input_shape[-1]
        if self.key_dim is None and features % self.num_heads:
            raise errors.value_error(
                f"`num_heads` of layer {self.name!r} must divide the {features} input features, or `key_dim` be given.",
                num_heads=self.num_heads,
            )
        key_dim = self.key_dim or features // self.num_heads
        common = {
            "use_bias": self.use_bias,
            "sequence_parallel": self.sequence_parallel,
            "kernel_initializer": self.kernel_initializer,
            "dtype": self.dtype_policy,
        }
        options = {"dropout": self.attention_dropout, "name": "attention", **common}
        if self.num_key_value_heads is None:
            self._attention = ParallelMultiHeadAttention(self.num_heads, key_dim, **options)
        else:
            self._attention = ParallelGroupedQueryAttention(key_dim, self.num_heads, self.num_key_value_heads, **options)
        self._mlp = ParallelMLP(self.hidden_units, activation=self.activation, gated=self.gated, name="mlp", **common)
        norm = _NORMALIZATIONS[self.normalization][self.sequence_parallel]
        self._attention_norm = norm(epsilon=self.epsilon, name="attention_norm", dtype=self.dtype_policy)
        self._mlp_norm = norm(epsilon=self.epsilon, name="mlp_norm", dtype=self.dtype_policy)
        self._dropout = keras.layers.Dropout(self.dropout, dtype=self.dtype_policy) if self.dropout else None
        for layer in (self._attention_norm, self._mlp_norm):
            layer.supports_masking = True  # a position's norm has nothing to do with others; Keras's RMSNormalization warns
            layer.build(input_shape)
        self._mlp.build(input_shape)
        self._attention.build(input_shape, input_shape)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        x = inputs
        if self.sequence_parallel and not self.input_is_parallel:
            x = regions.scatter_to(inputs, 1, f"{self.name}/scatter_sequence")
            copy_mask(inputs, x)
        normed = self._attention_norm(x)
        copy_mask(x, normed)
        attended = self._attention(normed, normed, use_causal_mask=self.use_causal_mask, training=training)
        x = keras.ops.add(x, self._dropped(attended, training))
        x = keras.ops.add(x, self._dropped(self._mlp(self._mlp_norm(x)), training))
        if self.sequence_parallel and self.gather_output:
            return regions.gather_from(x, 1, f"{self.name}/gather_sequence")
        return x if regions.tensor_program() is None else mark_shard(x, self.output_shard)

    @property
    def output_shard(self) -> ActivationShard | None:
        """How the output is sharded inside replicas; None: it is whole."""
        return None if self.gather_output else ActivationShard(1)

    def _dropped(self, x: Any, training: bool | None) -> Any:
        if self._dropout is None:
            return x
        with sharded_region() if self.sequence_parallel else contextlib.nullcontext():
            return self._dropout(x, training=training)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        names = (
            "num_heads hidden_units key_dim num_key_value_heads gated dropout attention_dropout normalization epsilon use_bias "
            "use_causal_mask sequence_parallel input_is_parallel gather_output"
        )
        return {
            **super().get_config(),
            **{name: getattr(self, name) for name in names.split()},
            "activation": keras.activations.serialize(self.activation),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }
