"""A `train_step` that scales its loss before its optimizer has been built, by the step itself: the scale moves all the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers

from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import assert_as_on_one_device
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
