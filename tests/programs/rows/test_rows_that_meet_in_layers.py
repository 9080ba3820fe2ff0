"""Layers of a functional model in which rows of the batch meet, or a number of them goes back to each: of all ranks, without a
word, or warned of, with the fix for it."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive

import tfdist
from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device
from tfdist.collectives import all_reduce

pytestmark = pytest.mark.as_traced

ROWS, BATCH = 13, 8  # a batch of 8, and one of 5


class Pairs(keras.layers.Layer):
    """Adds to each row a number of all rows."""

    def call(self, u, v):
        return keras.ops.sum(u, -1, keepdims=True) + self.of_all(keras.ops.tensordot(u, v, 2))

    def of_all(self, number):
        return number


class PairsReduced(Pairs):
    """As a warning says it: outside `strategy.run`, where the model is built, and on one device there is nothing to reduce."""

    def of_all(self, number):
        return all_reduce(number) if isinstance(tf.distribute.get_strategy(), tfdist.ShardedStrategy) else number


class Rolled(keras.layers.Layer):
    def call(self, u, v):
        return u * keras.ops.roll(v, 1, axis=0)


class InPairs(keras.layers.Layer):
    """Subtracts from each row the mean of it and the next: pairs, of which a rank may have one row."""

    def call(self, u, v):
        pairs = tf.reshape(u, [-1, 2, u.shape[1]])
        return v + tf.reshape(pairs - tf.reduce_mean(pairs, 1, keepdims=True), tf.shape(u))


class GatedByAMean(keras.layers.Layer):
    """Weights that a mean of the batch is multiplied with: their derivative on a rank without rows is 0 times NaN."""

    def build(self, u_shape, v_shape):
        self.kernel = self.add_weight(shape=(v_shape[-1], u_shape[-1]), name="kernel")

    def call(self, u, v):
        return u * tf.tanh(tf.reduce_mean(v, 0, keepdims=True) @ self.kernel)


def fitted(layer, strategy, rows=ROWS):
    rng = np.random.default_rng(2)
    with strategy.scope():
        one, other = keras.Input((4,)), keras.Input((4,))
        dense = functools.partial(keras.layers.Dense, 3, "tanh")
        found = layer()(dense()(one), dense()(other))
        model = keras.Model([one, other], keras.layers.Dense(1)(found))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    data = [rng.normal(size=(rows, 4)) for _ in range(2)]
    history = model.fit(data, rng.normal(size=(rows, 1)), batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "predicted": model.predict(data, batch_size=BATCH, verbose=0), **state(model)}


def program(layer, rows=ROWS):
    def fit(strategy):
        return fitted(layer, strategy, rows)

    return fit


@pytest.mark.parametrize(("layer", "zero_stage"), [(Pairs, 0), (PairsReduced, 3), (Rolled, 3)])
def test_it_is_one_device(layer, zero_stage):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*contains")
        assert_as_on_one_device(program(layer), zero_stage)


@pytest.mark.parametrize(
    ("layer", "zero_stage", "devices", "rows"),
    [
        (InPairs, 3, 2, 14),  # three rows on each of two ranks
        exhaustive(InPairs, 0, 2, 14),
        (GatedByAMean, 0, 4, 11),  # three on four ranks
        exhaustive(GatedByAMean, 3, 4, 11),
    ],
)
def test_few_rows(layer, zero_stage, devices, rows):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*contains")
        assert_as_on_one_device(program(layer, rows), zero_stage, devices)


def test_what_is_not_gathered_is_told_of():
    """A larger `gather_rows_bytes`, which the warning names, is the case above."""
    with pytest.warns(UserWarning, match="The layer 'rolled.*' contains rows that meet .*Roll"), pytest.raises(AssertionError):
        assert_as_on_one_device(program(Rolled), 0, gather_rows_bytes=0)
