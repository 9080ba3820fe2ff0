"""`OverGlobalBatch` of a function: in a step it is given what the step gives it, in a compiled loss what Keras gives losses."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive

import tfdist
from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device

pytestmark = pytest.mark.as_traced

RNG = np.random.default_rng(3)
X = RNG.normal(size=(11, 3)).astype("float32")
Y = RNG.normal(size=(11, 2)).astype("float32")
LABELS = RNG.integers(0, 2, size=11)


def picked(labels, p):
    """Needs integers."""
    assert labels.dtype.is_integer
    return tf.sqrt(tf.reduce_mean(tf.gather(p, labels, batch_dims=1) ** 2))


def of_two(targets, p):
    y, labels = targets
    assert labels.dtype.is_integer
    return tf.sqrt(tf.reduce_mean((y - p) ** 2)) + picked(labels, p)


FUNCTIONS = {
    "lambda": (lambda y, p: tf.sqrt(tf.reduce_mean((y - p) ** 2)), Y),
    "rows": (lambda y, p: tf.reduce_sum((y - p) ** 2, -1) / tf.reduce_mean(y**2), Y),
    "integers": (picked, LABELS),
    "two": (of_two, (Y, LABELS)),
}


class Model(keras.Model):
    def __init__(self, loss):
        super().__init__()
        self.out = keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(seed=1))
        self.loss_of_all = loss

    def call(self, x):
        return self.out(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of_all(y, self(x))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True))
        return {"loss_of_step": loss}


@pytest.mark.parametrize("stage", [exhaustive(0), 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_a_step(name, stage):
    function, targets = FUNCTIONS[name]

    def program(strategy):
        with strategy.scope():
            model = Model(tfdist.losses.OverGlobalBatch(function))
            model.compile(keras.optimizers.SGD(0.1))
        logs = model.fit(X, targets, batch_size=4, shuffle=False, verbose=0).history
        return {**logs, **state(model)}

    assert_as_on_one_device(program, stage)


@pytest.mark.parametrize("stage", [exhaustive(0), 3])
def test_compiled_it_gets_floats_as_any_function_that_keras_compiles(stage):
    def root(y, p):
        return tf.sqrt(tf.reduce_mean((tf.expand_dims(y, -1) if len(y.shape) == 1 else y - p) ** 2))

    def program(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile(keras.optimizers.SGD(0.1), tfdist.losses.OverGlobalBatch(root))
        return {**model.fit(X, LABELS, batch_size=4, shuffle=False, verbose=0).history, **state(model)}

    assert_as_on_one_device(program, stage)
