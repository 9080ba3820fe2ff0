"""Rows that a model pads to the longest of the batch: on each device, to the longest of all."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device

ROWS = [[3], [1, 4, 2, 6, 5], [7, 2], [6, 1, 3, 2, 4, 4, 1], [5, 5], [1], [2, 3, 7], [4], [6, 6, 1, 2]]  # the last batch has one
WORDS = ["a", "b a d c a", "c b", "d d d d d d d", "a", "b", "c c", "d", "a b d c"]
TARGETS = np.random.default_rng(2).normal(size=(len(ROWS), 1)).astype("float32")


class FromRagged(keras.layers.Layer):
    """The mean of what stands in a table, zeros behind a short row included."""

    def build(self, shape):
        self.table = self.add_weight(name="table", shape=(8, 3), initializer=keras.initializers.GlorotUniform(seed=1))

    def call(self, rows):
        return tf.reduce_mean(tf.gather(tf.convert_to_tensor(self.table), rows.to_tensor(default_value=1)), axis=1)


class OfRagged(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = FromRagged()
        self.last = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=2))

    def call(self, rows):
        return self.last(self.first(rows))


def of_ragged():
    return OfRagged(), tf.ragged.constant(ROWS)


def of_words():
    inputs = keras.Input((), dtype="string")
    numbers = keras.layers.TextVectorization(vocabulary=["a", "b", "c", "d"])(inputs)
    vectors = keras.layers.Embedding(8, 3, embeddings_initializer=keras.initializers.GlorotUniform(seed=3))(numbers)
    found = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=2))(
        keras.layers.GlobalAveragePooling1D()(vectors)
    )
    return keras.Model(inputs, found), tf.constant(WORDS)


@pytest.mark.as_traced
@pytest.mark.parametrize(("build", "zero_stage"), [(of_ragged, 3), (of_words, 0)])
def test_it_is_one_device(build, zero_stage):
    def padded(strategy):
        with strategy.scope():
            model, rows = build()
            model.compile(keras.optimizers.SGD(0.5), "mse")
        data = tf.data.Dataset.from_tensor_slices((rows, TARGETS)).batch(4)
        history = model.fit(data, epochs=2, verbose=0).history
        return {"history": history, "predicted": model.predict(data.map(lambda x, y: x), verbose=0), **state(model)}

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*contains")
        assert_as_on_one_device(padded, zero_stage)
