"""What a step assigns to a `tf.Variable` of the program's own, made in `scope()`: as to a variable of Keras, that of all rows."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from training import strategy_for

from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device, run, stages_in_turns

pytestmark = pytest.mark.as_traced

ROWS, BATCH = 21, 8  # the last batch has 5 rows


def batches():
    rng = np.random.default_rng(11)
    x, y = rng.normal(size=(ROWS, 5)).astype("float32"), rng.normal(size=(ROWS, 3)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def variable(value, dtype="float32"):
    return tf.Variable(tf.constant(value, dtype), trainable=False)


class Counted(keras.Model):
    """Moves a mean, adds up sums and counts, keeps a maximum and the rows of the last step's classes, in its step."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.dense.build((None, 5))
        self.mean, self.total, self.largest = variable([0.0] * 5), variable(0.0), variable(-9.0)
        self.steps, self.rows = variable(0, "int64"), variable(0, "int32")
        self.table = variable(np.zeros((4, 5)))

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y)) * (1.0 + tf.abs(self.mean[0]))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))
        self.total.assign_add(tf.reduce_sum(tf.square(x)))
        self.total.assign_sub(tf.reduce_sum(x))
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(x)))
        self.steps.assign_add(1)
        self.rows.assign_add(tf.shape(x)[0])
        places = tf.argmax(x[:, :4], -1)
        self.table.scatter_add(tf.IndexedSlices(x, places))
        return {"loss": loss, "mean": tf.reduce_sum(self.mean), "largest": self.largest + 0.0}

    def counted(self):
        mine = (self.mean, self.total, self.largest, self.steps, self.rows, self.table)
        return [np.asarray(one.numpy(), "float64") for one in mine]


class Centred(layers.Layer):
    """Subtracts a mean of the batch that it moves, in training."""

    def build(self, shape):
        self.mean = variable([0.0] * shape[-1])

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(x, 0))
        return x - self.mean


def in_a_step(strategy):
    with strategy.scope():
        model = Counted()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    history = model.fit(batches(), epochs=2, shuffle=False, verbose=0).history
    return [history, model.counted(), state(model)]


def in_a_layer(strategy):
    with strategy.scope():
        layer = Centred()
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh"), layer, layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    history = model.fit(batches(), epochs=2, shuffle=False, verbose=0).history
    return [history, layer.mean.numpy(), state(model)]


def in_a_loop(strategy):
    with strategy.scope():
        total, rows, centre = variable(0.0), variable(0, "int32"), variable([0.0] * 3)

    def on_rank(x, y):
        loss = tf.nn.compute_average_loss(tf.reduce_sum(tf.square(x[:, :3] - y), -1), global_batch_size=BATCH)
        total.assign_add(loss)
        rows.assign_add(tf.shape(x)[0])
        centre.assign(tf.reduce_mean(y, 0))

    @tf.function
    def step(x, y):
        strategy.run(on_rank, args=(x, y))

    for batch in strategy.experimental_distribute_dataset(batches()):
        step(*batch)
    return [total.numpy(), rows.numpy(), centre.numpy()]


@pytest.mark.parametrize(("program", "zero_stage"), list(stages_in_turns([in_a_step, in_a_layer, in_a_loop])))
def test_it_is_one_device(program, zero_stage):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_as_on_one_device(program, zero_stage)


def test_four_devices():
    assert_as_on_one_device(in_a_step, 3, devices=4)


def eagerly(strategy):
    """In an eager step a floating one becomes the mean over the devices, by their rows."""
    with strategy.scope():
        layer = Centred()
        model = keras.Sequential([keras.Input((5,)), layer, layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
    model.fit(batches(), verbose=0)
    return layer.mean.numpy()


def test_eagerly():
    expected, found = (run(eagerly, strategy) for strategy in (tf.distribute.get_strategy(), strategy_for(2, 0)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
