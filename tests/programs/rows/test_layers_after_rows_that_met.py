"""Layers of Keras after what lets rows of the batch meet, and layers that are called on a part of the batch."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers

from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import assert_as_on_one_device

pytestmark = pytest.mark.as_traced

RNG = np.random.default_rng(8)
X, Y = RNG.normal(size=(22, 6)).astype("float32"), RNG.normal(size=(22, 3)).astype("float32")


class Block(layers.Layer):
    """Attention of the rows of the batch among each other, and a layer behind it."""

    def __init__(self, last):
        super().__init__()
        self.query, self.last = layers.Dense(6, use_bias=False), last

    def call(self, x):
        query = self.query(x)
        return self.last(x + tf.matmul(tf.nn.softmax(tf.matmul(query, query, transpose_b=True)), x))


def as_images(layer):
    return keras.Sequential([layers.Reshape((6, 1)), layer, layers.Flatten()])


BEHIND = {
    "normalization": layers.LayerNormalization,
    "rms": layers.RMSNormalization,
    "convolution": lambda: as_images(layers.Conv1D(2, 3)),
    "pooling": lambda: as_images(layers.MaxPooling1D(2)),
    "synchronized": lambda: layers.BatchNormalization(synchronized=True),
    "residual": lambda: layers.Dense(6, "gelu"),
}


def fitted(strategy, build, last_rows=22, **compiled):
    with strategy.scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), **compiled)
    record = BatchLogs()
    data = tf.data.Dataset.from_tensor_slices((X[:last_rows], Y[:last_rows])).batch(8)
    model.fit(data, verbose=0, shuffle=False, callbacks=[record])
    predicted = model.predict(data.map(lambda x, y: x), verbose=0) if "loss" in compiled else None
    return {"logs": record.train, "predicted": predicted, **state(model)}


def behind_attention(name):
    def program(strategy):
        def build():
            return keras.Sequential([keras.Input((6,)), layers.Dense(6, "tanh"), Block(BEHIND[name]()), layers.Dense(3)])

        return fitted(strategy, build, loss="mse")

    return program


class Reversed(keras.Model):
    """A residual of the model's own behind rows in another order: its `predict` knows how many rows there are."""

    def __init__(self):
        super().__init__()
        self.dense, self.last = layers.Dense(6), layers.Dense(3)
        self.dense.build((None, 6))
        self.last.build((None, 6))
        self.built = True

    def call(self, x):
        mixed = x + x[::-1]
        return self.last(mixed + self.dense(mixed))


def reversed_rows(strategy):
    return fitted(strategy, Reversed, loss="mse")


class OnAPart(Reversed):
    """A model that a step calls on parts of the batch."""

    splits = True

    def call(self, x):
        return self.last(tf.tanh(self.dense(x)))

    def train_step(self, data):
        x, y = data
        half = tf.shape(x)[0] // 2
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x[:half]) - y[:half]) ** 2) + 0.3 * tf.reduce_mean(self(x[::2]) ** 2)
            for x_part, y_part in zip(tf.split(x, 2), tf.split(y, 2), strict=True) if self.splits else ():
                loss += 0.1 * tf.sqrt(tf.reduce_mean((self(x_part) - y_part) ** 2))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def on_parts(strategy):
    return fitted(strategy, OnAPart)


def on_parts_of_arrays(strategy):
    """Whose batches have sizes that the trace knows, and cannot be split into others."""
    with strategy.scope():
        model = OnAPart()
        model.splits = False
        model.compile(keras.optimizers.SGD(0.05))
    history = model.fit(X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0).history
    return {"history": history, **state(model)}


class MixedLabels(Reversed):
    """Keras's crossentropies of logits that met; masks of positions in the batch."""

    def train_step(self, data):
        x, y = data
        labels, places = tf.argmax(y, 1), tf.range(tf.shape(x)[0])
        with tf.GradientTape() as tape:
            found = self.last(self.dense(x))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, found + tf.roll(found, 1, 0))
            similar = tf.matmul(found, found, transpose_b=True)
            loss += tf.reduce_mean(tf.where(places[:, None] != places[None], tf.tanh(similar), 0.0) ** 2)
            ages = tf.cast(places, tf.float32)
            discounts = tf.where(ages[None] >= ages[:, None], 0.9 ** (ages[None] - ages[:, None]), 0.0)
            loss += 0.1 * tf.reduce_mean((tf.linalg.matvec(discounts, y[:, 0]) - found[:, 0]) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def mixed_labels(strategy):
    return fitted(strategy, MixedLabels)


def two_losses_of_pairs(strategy):
    """At stage 3 weights of the second are gathered when those of the first have been used, by rows that will have met."""

    class Pairs(keras.Model):
        def __init__(self):
            super().__init__()
            self.heads = [layers.Dense(4), layers.Dense(4)]
            for head in self.heads:
                head.build((None, 6))
            self.scale = self.add_weight(shape=(5, 2), name="scale")
            self.built = True

        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                z = self.heads[0](x)
                close = tf.reduce_sum(tf.exp(-tf.reduce_sum(tf.abs(z[:, None] - z[None]), 2)), 1, keepdims=True)
                loss = tf.reduce_mean(tf.matmul(tf.concat([z, close], 1), self.scale) ** 2)
                z = self.heads[1](x)
                loss += tf.reduce_mean(tf.reduce_max(tf.reduce_sum((z[:, None] - z[None]) ** 2, 2), 1))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    return fitted(strategy, Pairs)


PROGRAMS = {name: behind_attention(name) for name in BEHIND} | {
    function.__name__: function for function in (reversed_rows, on_parts, on_parts_of_arrays, mixed_labels, two_losses_of_pairs)
}


def cases():
    for place, name in enumerate(PROGRAMS):
        first = 3 if name == "two_losses_of_pairs" else 3 * (place % 2)
        yield from ((name, stage) if stage == first else exhaustive(name, stage) for stage in (0, 3))


@pytest.mark.parametrize(("name", "zero_stage"), list(cases()))
def test_it_is_one_device(name, zero_stage):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*contains")
        assert_as_on_one_device(PROGRAMS[name], zero_stage)
