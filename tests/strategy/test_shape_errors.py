"""Operations that need all rows of a batch, of which a device has a part: an error says what to do, and that is exact."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import one_device, strategy_for

RNG = np.random.default_rng(2)
NODES, LINKS = RNG.normal(size=(8, 5)).astype("float32"), (RNG.random((8, 8)) < 0.4).astype("float32")
TARGETS = RNG.normal(size=(8, 3)).astype("float32")


class GraphConvolution(keras.layers.Layer):
    """Sums over the neighbours of each of a graph's nodes, which are the rows of the batch."""

    def build(self, shape):
        self.dense = keras.layers.Dense(3)
        self.dense.build(shape)

    def call(self, x):
        return keras.ops.matmul(keras.ops.convert_to_tensor(LINKS), self.dense(x))

    def compute_output_shape(self, shape):
        return (*shape[:-1], 3)


def made(strategy):
    keras.utils.set_random_seed(4)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), GraphConvolution()])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def test_a_graph_convolution_over_nodes():
    model = made(strategy_for(2, 3))
    with pytest.raises(ValueError, match="train_on_batch"):
        model.fit(NODES, TARGETS, batch_size=8, verbose=0)
    model, plain = made(strategy_for(2, 3)), made(one_device())
    for _ in range(2):
        loss, expected = model.train_on_batch(NODES, TARGETS), plain.train_on_batch(NODES, TARGETS)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for mine, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


ROWS = 6
X, Y = RNG.normal(size=(12, 3)).astype("float32"), RNG.normal(size=(12, 4)).astype("float32")


class Written(keras.Model):
    """Has a number of rows written into its step, or asks for it."""

    def __init__(self, way, asks):
        super().__init__()
        self.dense, self.way, self.asks = keras.layers.Dense(4), way, asks

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        rows = tf.shape(x)[0] if self.asks else ROWS
        with tf.GradientTape() as tape:
            p = self(x)
            if self.way == "zeros":
                p = p + keras.ops.zeros((rows, 4))
            elif self.way == "ones":
                p = tf.concat([p, tf.ones((rows, 1))], 1)[:, :4]
            else:
                p = tf.matmul(tf.eye(rows), p)
            loss = tf.reduce_mean((p - y) ** 2)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True))
        return {"loss_of_step": loss}


@pytest.mark.parametrize(
    ("way", "is_static"), [("zeros", False), ("zeros", True), ("ones", False), ("ones", True), ("product", True)]
)
@pytest.mark.parametrize("stage", [exhaustive(0), 3])
def test_a_number_of_rows_that_is_written_into_a_step(way, is_static, stage):
    """The error names both numbers and what to write instead, and that is one device's."""

    def fitted(strategy, asks):
        keras.utils.set_random_seed(4)
        with strategy.scope():
            model = Written(way, asks)
            model.compile(keras.optimizers.SGD(0.1))
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(ROWS, drop_remainder=is_static)
        model.fit(data, verbose=0)
        return model.get_weights()

    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as error:
        fitted(strategy_for(2, stage), asks=False)
    said = str(error.value) + " ".join(getattr(error.value, "__notes__", []))
    assert re.search(r"a part of the rows of a batch, here.* 3, where 6 are wanted.*`tf.shape\(x\)\[0\]`", said)
    for found, expected in zip(fitted(strategy_for(2, stage), asks=True), fitted(one_device(), asks=True), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


VIEWS = RNG.normal(size=(4, 2, 5, 3)).astype("float32")  # steps, views, rows, features


class TwoViews(keras.Model):
    """Compares two views of each row, which the first or the second axis of a batch numbers."""

    def __init__(self, axis, way):
        super().__init__()
        self.dense, self.axis, self.way = keras.layers.Dense(4), axis, way

    def call(self, x):
        return self.dense(x)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            if self.way == "index":
                first, second = (x[0], x[1]) if self.axis == 0 else (x[:, 0], x[:, 1])
            else:
                first, second = tf.unstack(x, axis=self.axis)
            loss = tf.reduce_mean((self(first) - self(second) ** 2) ** 2)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True))
        return {"loss_of_step": loss}


@pytest.mark.parametrize("way", ["index", "unstack"])
@pytest.mark.parametrize("stage", [exhaustive(0), 3])
def test_arrays_whose_first_axis_is_not_the_batch(way, stage):
    def fitted(strategy, axis):
        keras.utils.set_random_seed(4)
        with strategy.scope():
            model = TwoViews(axis, way)
            model.compile(keras.optimizers.SGD(0.1))
        model.fit(tf.data.Dataset.from_tensor_slices(VIEWS if axis == 0 else VIEWS.swapaxes(1, 2)), verbose=0)
        return model.get_weights()

    with pytest.raises((IndexError, ValueError), match=r"let arrays \(2, rows, ...\) be \(rows, 2, ...\)"):
        fitted(strategy_for(2, stage), axis=0)
    for found, expected in zip(fitted(strategy_for(2, stage), axis=1), fitted(one_device(), axis=0), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_first_axis_of_batches_whose_size_only_the_step_finds():
    """Where nothing is gathered an index fails when the step runs."""
    with strategy_for(2, 0, gather_rows_bytes=0).scope():
        model = TwoViews(0, "index")
        model.compile(keras.optimizers.SGD(0.1))
    spec = tf.TensorSpec((None, 5, 3))
    with pytest.raises(tf.errors.InvalidArgumentError) as error, pytest.warns(UserWarning, match="gather_rows_bytes"):
        model.fit(tf.data.Dataset.from_generator(lambda: iter(VIEWS), output_signature=spec), verbose=0)
    assert "let arrays (2, rows, ...) be (rows, 2, ...)" in " ".join(error.value.__notes__)
