"""The Keras model of a decoder's configuration: plain layers of Keras, in blocks of their published shapes."""

from collections.abc import Callable
from typing import Any

import keras

from tfdist import errors
from tfdist.tools.planning.known_models import DecoderConfig


class DecoderBlock(keras.layers.Layer):
    """Attention and MLP of a decoder, each after a normalization, with residuals:

        x + attention(norm(x)), then x + mlp(norm(x)); in parallel, x + attention(y) + mlp(y) with y = norm(x)

    Rotations of queries and keys are left out: they have no parameters, and cost little beside the rest.

    Args:
        config: the sizes.

    Input shape:
        (batch, sequence, width)

    Output shape:
        the same
    """

    def __init__(self, config: DecoderConfig, **kwargs: Any):
        super().__init__(**kwargs)
        layers, bias = keras.layers, config.has_bias
        self.config = config
        self.attention_norm = _norm(config, "attention_norm")
        self.attention = layers.GroupQueryAttention(
            config.head_size, config.num_heads, config.num_key_value_heads, use_bias=bias, name="attention"
        )
        self.mlp_norm = None if config.is_parallel else _norm(config, "mlp_norm")
        self.mlp_gate = layers.Dense(config.mlp_width, config.activation, use_bias=bias, name="mlp_gate")
        self.mlp_in = layers.Dense(config.mlp_width, use_bias=bias, name="mlp_in") if config.is_gated else None
        self.mlp_out = layers.Dense(config.width, use_bias=bias, name="mlp_out")

    def build(self, input_shape: Any) -> None:
        self.attention.build(input_shape, input_shape)
        for layer in (self.attention_norm, self.mlp_norm, self.mlp_gate, self.mlp_in):
            if layer is not None:
                layer.build(input_shape)
        self.mlp_out.build((*input_shape[:-1], self.config.mlp_width))

    def call(self, x: Any) -> Any:
        y = self.attention_norm(x)
        attended = self.attention(y, y, use_causal_mask=True)
        if self.mlp_norm is None:
            return x + attended + self._mlp(y)
        x = x + attended
        return x + self._mlp(self.mlp_norm(x))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def _mlp(self, y: Any) -> Any:
        hidden = self.mlp_gate(y)
        return self.mlp_out(hidden if self.mlp_in is None else hidden * self.mlp_in(y))


class PositionEmbedding(keras.layers.Layer):
    """Adds a learned vector for each position.

    Args:
        length: the positions.
    """

    def __init__(self, length: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.length = length

    def build(self, input_shape: Any) -> None:
        self.table = self.add_weight(shape=(self.length, input_shape[-1]), initializer="random_normal", name="table")

    def call(self, x: Any) -> Any:
        return x + self.table[: x.shape[1]]


def decoder_builder(config: DecoderConfig, sequence_length: int | None = None) -> Callable[[], keras.Model]:
    """Returns a `build` for `tfdist.plan`: the model of `config`, compiled with AdamW and the loss of next tokens.

    It takes tokens (batch, sequence) to logits (batch, sequence, vocabulary).

    Args:
        config: one of `known_models.KNOWN_MODELS`, or of your own.
        sequence_length: tokens of an example; None: the longest that the model was published with.

    Raises:
        ValueError: `sequence_length` is not a positive integer, or longer than the table of positions.
    """
    length = config.max_sequence_length if sequence_length is None else sequence_length
    errors.check_integer("sequence_length", length, 1)
    if config.has_positions and length > config.max_sequence_length:
        raise errors.value_error(
            f"`sequence_length` must be at most {config.max_sequence_length}: {config.name} has a vector for each position.",
            sequence_length=length,
        )

    def build() -> keras.Model:
        tokens = keras.Input((length,), dtype="int32", name="tokens")
        embedding = (keras.layers.ReversibleEmbedding if config.is_tied else keras.layers.Embedding)(
            config.vocabulary_size, config.width, name="embedding"
        )
        x = embedding(tokens)
        if config.has_positions:
            x = PositionEmbedding(config.max_sequence_length, name="positions")(x)
        for index in range(config.num_layers):
            x = DecoderBlock(config, name=f"block_{index}")(x)
        x = _norm(config, "norm")(x)
        if config.is_tied:
            logits = embedding(x, reverse=True)
        else:
            logits = keras.layers.Dense(config.vocabulary_size, use_bias=False, name="head")(x)
        model = keras.Model(tokens, logits, name=config.name.replace("-", "_"))
        model.compile(optimizer="adamw", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return build


def _norm(config: DecoderConfig, name: str) -> keras.layers.Layer:
    if config.normalization == "rms":
        return keras.layers.RMSNormalization(name=name)
    return keras.layers.LayerNormalization(center=config.has_bias, name=name)
