"""Architectures whose parameters are read in unusual places, with every stage, against one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers
from training import CLASSES, JoinedWeights, Trained, assert_same, fit, one_device, strategy_for

RNG = np.random.default_rng(11)
SEQUENCES = RNG.normal(size=(72, 7, 15)).astype("float32")
TOKENS = RNG.integers(0, 50, size=(72, 9))
LABELS = RNG.integers(0, CLASSES, size=72)


def stack(*parts):
    return keras.Sequential([keras.Input((7, 15)), *parts, layers.Flatten(), layers.Dense(CLASSES)])


class ControlFlow(layers.Layer):
    """Reads its weights in the bodies of cond, map, while and scan only."""

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], shape[-1]))
        self.gain = self.add_weight(name="gain", shape=(), initializer="ones")
        self.shifts = self.add_weight(name="shifts", shape=(3,))

    def call(self, x):
        x = tf.cond(tf.shape(x)[0] > 2, lambda: tf.matmul(x, self.kernel), lambda: 2.0 * tf.matmul(x, self.kernel))
        x = tf.map_fn(lambda row: row @ self.kernel, x)
        _, x = tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, tf.tanh(x + self.shifts[i])), [0, x])
        steps = tf.transpose(x, [1, 0, 2])
        return tf.transpose(tf.scan(lambda a, step: 0.5 * a + step * self.gain, steps, tf.zeros_like(x[:, 0])), [1, 0, 2])


class NestedFunction(layers.Layer):
    """Reads its weight in a `tf.function` of its own."""

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], shape[-1]))

    @tf.function
    def product(self, x):
        return tf.matmul(x, self.kernel)

    def call(self, x):
        return self.product(x)


class PartlyUsed(layers.Layer):
    """One of its weights takes no part in the loss: Keras gives it no gradient, and neither decay nor momentum."""

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], shape[-1]))
        self.unused = self.add_weight(name="unused", shape=(3, 5))

    def call(self, x):
        return tf.matmul(x, self.kernel)


@keras.saving.register_keras_serializable("tests")
class LazilyBuilt(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(17)
        self.norm = layers.LayerNormalization()
        self.head = layers.Dense(CLASSES)

    def call(self, x):
        return self.head(tf.reduce_mean(self.norm(self.inner(x)), axis=1))


def used_three_times():
    inputs = keras.Input((7, 15))
    shared = layers.Dense(15, activation="tanh")
    x = shared(layers.LayerNormalization()(shared(inputs)))
    x = shared(layers.Dense(15)(x))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Flatten()(x)))


def attention():
    inputs = x = keras.Input((7, 15))
    normed = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(3, 5)(normed, normed, use_causal_mask=True)
    x = x + layers.Dense(15, activation="gelu")(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


def kinds_of_weights():
    """Weights partly unused, regularized and constrained, and frozen."""
    regularized = layers.Dense(16, kernel_regularizer="l2", kernel_constraint=keras.constraints.MaxNorm(0.5))
    frozen = layers.Dense(17, activation="relu", trainable=False)
    return stack(PartlyUsed(), regularized, frozen, layers.Dense(9))


def embedding():
    return keras.Sequential(
        [keras.Input((9,), dtype="int32"), layers.Embedding(50, 33), layers.GlobalAveragePooling1D(), layers.Dense(CLASSES)]
    )


MODELS = {
    "control_flow": lambda: stack(ControlFlow()),
    "recurrent": lambda: stack(layers.Bidirectional(layers.LSTM(9), backward_layer=layers.GRU(9, go_backwards=True))),
    "stacked_cells": lambda: stack(layers.RNN([layers.LSTMCell(9), layers.GRUCell(7)])),
    "convolutions": lambda: stack(layers.Reshape((7, 15, 1)), layers.Conv2D(5, 3, activation="relu"), layers.DepthwiseConv2D(3)),
    "nested_function": lambda: stack(NestedFunction(), JoinedWeights(), NestedFunction()),
    "lazily_built": LazilyBuilt,
    "used_three_times": used_three_times,
    "attention": attention,
    "kinds_of_weights": kinds_of_weights,
}


def train(strategy, name) -> Trained:
    optimizer = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9, weight_decay=0.1)
    return fit(strategy, MODELS[name], optimizer, data=(SEQUENCES, LABELS))


@functools.cache
def on_one_device(name):
    return train(one_device(), name)


# Stage 2 reads its parameters as TensorFlow's own strategy does: those that it steps, or does not, in unusual ways are enough.
CASES = [(name, 3, 3 if place % 4 == 0 else 2) for place, name in enumerate(MODELS) if name != "stacked_cells"]
CASES += [exhaustive("stacked_cells", 3, 2)]  # loops over steps, as of "recurrent"
CASES += [("kinds_of_weights", 2, 2)]
CASES += [exhaustive(name, 2, 2) for name in ("control_flow", "lazily_built", "used_three_times")]


@pytest.mark.filterwarnings("error:The layer .* contains rows that meet:UserWarning")  # a false alarm
@pytest.mark.as_traced
@pytest.mark.parametrize(("name", "zero_stage", "devices"), CASES)
def test_architecture(name, zero_stage, devices):
    assert_same(train(strategy_for(devices, zero_stage), name), on_one_device(name))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"prefetch": 0}, "control_flow"),
        exhaustive({"prefetch": 3}, "stacked_cells"),
        ({"prefetch": 3}, "used_three_times"),
        # All layers at once, as by default in models this small; and two or three.
        exhaustive({"group_bytes": 2**20}, "control_flow"),
        exhaustive({"group_bytes": 2**20}, "lazily_built"),
        ({"group_bytes": 2**20}, "kinds_of_weights"),
        ({"group_bytes": 2000}, "attention"),
        exhaustive({"group_bytes": 2000}, "stacked_cells"),
        exhaustive({"group_bytes": 2000}, "used_three_times"),
        exhaustive({"group_bytes": 2000}, "kinds_of_weights"),
        ({"use_kernels": False}, "attention"),
        exhaustive({"reshard_after_forward": False}, "control_flow"),
        exhaustive({"reshard_after_forward": False}, "attention"),
        ({"reshard_after_forward": False}, "used_three_times"),
    ],
    ids=str,
)
def test_settings_of_stage_3_change_no_number(settings, name):
    assert_same(train(strategy_for(2, 3, **settings), name), on_one_device(name))


def dense_gradients(base):
    class DenseGradients(base):
        def apply(self, grads, trainable_variables=None):
            super().apply([tf.convert_to_tensor(grad) for grad in grads], trainable_variables)

    return DenseGradients


EMBEDDED = {
    "adam": (keras.optimizers.Adam, {"learning_rate": 0.01}),
    "clipped": (keras.optimizers.SGD, {"learning_rate": 0.5, "global_clipnorm": 0.1}),
}


@functools.cache
def embedded_on_one_device(name):
    base, settings = EMBEDDED[name]
    return fit(one_device(), embedding, lambda: dense_gradients(base)(**settings), data=(TOKENS, LABELS))


@pytest.mark.as_traced
@pytest.mark.parametrize(
    ("zero_stage", "name"), [(0, "adam"), exhaustive(1, "adam"), exhaustive(2, "adam"), (3, "adam"), (3, "clipped")]
)
def test_embedding_gradients_are_summed_like_dense_ones(zero_stage, name):
    """Keras squares, and takes the norm of, the duplicates of a sparse gradient unsummed; here it is the dense gradient's."""
    base, settings = EMBEDDED[name]
    strategy = strategy_for(4 if name == "clipped" else 2, zero_stage)
    found = fit(strategy, embedding, lambda: base(**settings), data=(TOKENS, LABELS))
    assert_same(found, embedded_on_one_device(name))
