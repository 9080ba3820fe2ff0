"""A `train_step` that scales its loss before its optimizer has been built, by the step itself: the scale moves all the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers

from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import assert_as_on_one_device, on_one_device
from tests.programs.fitting import BATCH, regression

pytestmark = pytest.mark.as_traced


class Scaling(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - 10 * y) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def fitted(initial_scale, growth_steps):
    def program(strategy):
        x, y = regression(np.random.default_rng(5), 6)
        with strategy.scope():
            model = Scaling([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(3)])
            inner = keras.optimizers.SGD(0.05, momentum=0.9)
            optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale, dynamic_growth_steps=growth_steps)
            model.compile(optimizer)
        logs = BatchLogs()
        model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=[logs])
        return {"logs": logs.train, "scale": float(optimizer.dynamic_scale), **state(model)}

    return program


# Twice as large after two steps; and one with which the gradients of the first steps overflow, and are skipped.
PROGRAMS = {"grows": fitted(1024.0, 2), "shrinks": fitted(2.0**127, 2000)}


def scales(initial_scale):
    """The scale after each step in float16, whose numbers overflow at 65504: halved until no gradient does on the way back."""

    def program(strategy):
        x, y = regression(np.random.default_rng(5), 6)
        half = {"dtype": "mixed_float16"}
        with strategy.scope():
            dense = [layers.Dense(5, "tanh", **half), layers.Dense(3, **half)]
            model = Scaling([keras.Input((6,)), *dense, layers.Activation("linear", dtype="float32")])
            model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.001), initial_scale))
        found = []
        record = keras.callbacks.LambdaCallback(on_batch_end=lambda *_, **__: found.append(float(model.optimizer.dynamic_scale)))
        model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=[record])
        return found[:7]  # later, the sum over the rows of all devices may overflow where none of its parts does

    return program


@pytest.mark.parametrize(
    ("name", "zero_stage"),
    [
        ("grows", 0),
        *(exhaustive("grows", stage) for stage in (1, 2, 3)),
        (
            "shrinks",
            3,
        ),  # below, gradients are of a device's mean before they are summed, and overflow a step of the scale earlier
    ],
)
def test_it_is_one_device(name, zero_stage):
    assert_as_on_one_device(PROGRAMS[name], zero_stage)


HALVED = scales(2.0**20)


@pytest.mark.parametrize(("zero_stage", "devices"), [exhaustive(0, 4), exhaustive(1, 2), exhaustive(3, 4)])
def test_float16_overflows_when_that_of_one_device_does(zero_stage, devices):
    assert_as_on_one_device(HALVED, zero_stage, devices)
    assert on_one_device(HALVED)[-1] < 2.0**18  # some steps have overflowed
