"""A `tf.custom_gradient` that looks at what comes back to all rows together: warned of; reduced over the devices it is exact."""

import warnings

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops
from training import strategy_for

import tfdist
from tests.programs.comparing import assert_as_on_one_device, run
from tests.programs.fitting import Fitted, regression

pytestmark = pytest.mark.as_traced


def limited_together(upstream):
    return upstream / (tf.norm(upstream) + 1e-6)


def centred(upstream):
    return upstream - tf.reduce_mean(upstream, 0)


def limited_one_by_one(upstream):
    return tf.clip_by_norm(upstream, 0.02, axes=[-1])


def reversed_and_smaller(upstream):
    return -0.3 * upstream


def limited_over_devices(upstream):
    size = tf.reduce_sum(upstream**2)
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        size = tfdist.collectives.all_reduce(size, "data")
    return upstream / (tf.sqrt(size) + 1e-6)


class Changed(layers.Layer):
    """Passes on what it is given; `change` makes something else of what comes back."""

    def __init__(self, change):
        super().__init__()
        self.change = tf.custom_gradient(lambda x: (tf.identity(x), change))

    def call(self, x):
        return self.change(x)


class Stepping(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def descent():
    return {"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "loss": "mse"}


def program_of(change, model):
    def build():
        return model([keras.Input((6,)), layers.Dense(5, "tanh"), Changed(change), layers.Dense(5, "tanh"), layers.Dense(3)])

    return Fitted(change.__name__, build, lambda rng: regression(rng, 6), descent, epochs=1)


CHANGES = {
    limited_together: True,
    centred: True,
    limited_one_by_one: False,
    reversed_and_smaller: False,
    limited_over_devices: False,
}
PROGRAMS = {(change, model): program_of(change, model) for change in CHANGES for model in (keras.Sequential, Stepping)}


@pytest.mark.parametrize(
    ("change", "model", "zero_stage"),
    [
        (limited_together, Stepping, 0),
        *(exhaustive(change, model, stage) for change in CHANGES for model in (keras.Sequential, Stepping) for stage in (0, 3)),
    ],
)
def test_it_is_told_or_one_device(change, model, zero_stage):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if CHANGES[change]:
            run(PROGRAMS[change, model], strategy_for(2, zero_stage))
        else:
            assert_as_on_one_device(PROGRAMS[change, model], zero_stage)
    told = [one for one in found if "tf.custom_gradient" in str(one.message)]
    assert bool(told) == CHANGES[change]
