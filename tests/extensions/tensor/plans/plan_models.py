"""Tiny models that hold layers which can be sharded, in the ways in which users nest them."""

import functools
import importlib
import pathlib
import sys

import keras
import tensorflow as tf
from keras import layers, ops

EXAMPLES = str(pathlib.Path(__file__).parents[4] / "examples")


@functools.cache
def example_gpt(*, width=16, blocks=2, heads=4, seq_len=8):
    """The model of examples/train_gpt.py."""
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    return importlib.import_module("train_gpt").build_model(width=width, layers=blocks, heads=heads, seq_len=seq_len)


def chain(*units, features=8, activation="relu"):
    """Dense after Dense, named dense_0 and so on."""
    made = [layers.Dense(size, activation=activation, name=f"dense_{i}") for i, size in enumerate(units)]
    return keras.Sequential([keras.Input((features,)), *made], name="chain")


class GatedMLP(layers.Layer):
    """`down(dropout(silu(gate(x)) * up(x) * 0.5))`."""

    def __init__(self, width, hidden, **kwargs):
        super().__init__(**kwargs)
        self.gate = layers.Dense(hidden, activation="silu", name="gate")
        self.up = layers.Dense(hidden, name="up")
        self.dropout = layers.Dropout(0.1)
        self.down = layers.Dense(width, name="down")

    def build(self, shape):
        self.gate.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], self.gate.units))

    def call(self, x, training=None):
        return self.down(self.dropout(self.gate(x) * self.up(x) * 0.5, training=training))


class Block(layers.Layer):
    """Pre-LN: attention and a gated MLP. Returns something beside the tensor, as blocks with a cache do."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.attention_norm = layers.LayerNormalization(name="attention_norm")
        self.attention = layers.GroupQueryAttention(width // 4, 4, 2, name="attention")
        self.mlp_norm = layers.RMSNormalization(name="mlp_norm")
        self.mlp = GatedMLP(width, 2 * width, name="mlp")

    def call(self, x, training=None):
        y = self.attention_norm(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.mlp(self.mlp_norm(x)), None


class Tokens(layers.Layer):
    """Token and position embeddings; the positions are computed from the shape, as in Keras's own examples."""

    def __init__(self, vocabulary, positions, width, **kwargs):
        super().__init__(**kwargs)
        self.token = layers.Embedding(vocabulary, width, mask_zero=True, name="token")
        self.position = layers.Embedding(positions, width, name="position")

    def call(self, x):
        return self.token(x) + self.position(ops.arange(0, ops.shape(x)[-1]))


class Decoder(keras.Model):
    """A subclassed decoder with everything nested."""

    def __init__(self, width=16, **kwargs):
        super().__init__(name="decoder", **kwargs)
        self.tokens = Tokens(30, 64, width, name="tokens")
        self.blocks = [Block(width, name=f"block_{i}") for i in range(2)]
        self.head = layers.Dense(30, name="head")

    def call(self, x, training=None):
        x = self.tokens(x)
        for block in self.blocks:
            x, _ = block(x, training=training)
        return self.head(x)


def new_decoder(width=16):
    model = Decoder(width)
    model(ops.ones((3, 8), "int32"))
    return model


decoder = functools.cache(new_decoder)  # nothing here changes a model


class RawOps(layers.Layer):
    """Two Dense with an op of TensorFlow between them, which takes no symbols."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inside = [layers.Dense(16, name="first"), layers.Dense(8, name="second")]

    def build(self, shape):
        self.inside[0].build(shape)
        self.inside[1].build((*shape[:-1], 16))

    def call(self, x):
        return self.inside[1](tf.nn.relu(self.inside[0](x)))


def with_raw_ops():
    """RawOps, then a pair that can be followed."""
    x = keras.Input((8,))
    y = layers.Dense(16, name="up")(RawOps(name="raw")(x))
    return keras.Model(x, layers.Dense(8, name="down")(y))


def subclassed(function, *made, example, training=False):
    """A built model that calls `function(layers, x)`; with `training`, `function(layers, x, training)`."""

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__(name="subclassed")
            self.made = list(made)

        def call(self, x, training=None):
            return function(self.made, x, training) if pass_training else function(self.made, x)

    pass_training = training
    model = Subclassed()
    model(example)
    return model
