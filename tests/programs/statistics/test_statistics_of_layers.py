"""Statistics that a layer takes of the global batch: codebooks, and normalization that sends gradients from rank to rank."""

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers
from training import CLASSES

from tests.programs.comparing import assert_as_on_one_device
from tests.programs.loops.test_custom_steps import Mixed, fit, grid
from tests.programs.small_training import fitted, normal, sgd

pytestmark = pytest.mark.as_traced

FEATURES = 6


class Codebook(layers.Layer):
    """VQ-VAE: the codebook is an average of the rows that chose each of its columns; gradients go straight through."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(shape[-1], 7), initializer="uniform", trainable=False)
        self.counts = self.add_weight(shape=(7,), initializer="ones", trainable=False)
        self.sums = self.add_weight(shape=(shape[-1], 7), initializer="uniform", trainable=False)

    def call(self, x, training=False):
        codes = tf.convert_to_tensor(self.codes)
        distances = tf.reduce_sum(x**2, 1, keepdims=True) + tf.reduce_sum(codes**2, 0) - 2 * x @ codes
        chosen = tf.one_hot(tf.argmin(distances, 1), 7)
        nearest = tf.matmul(chosen, codes, transpose_b=True)
        if training:
            self.counts.assign(0.9 * self.counts + 0.1 * tf.reduce_sum(chosen, 0))
            self.sums.assign(0.9 * self.sums + 0.1 * tf.matmul(x, chosen, transpose_a=True))
            self.codes.assign(self.sums / self.counts)
        self.add_loss(0.25 * tf.reduce_mean((tf.stop_gradient(nearest) - x) ** 2))
        return x + tf.stop_gradient(nearest - x)


def codebook(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(4), Codebook(), layers.Dense(3)])
        model.compile(sgd(), "mse")
    return fitted(model, normal(FEATURES), normal(3, seed=2))


@pytest.mark.parametrize(("program", "zero_stage"), [exhaustive(codebook, 0), exhaustive(codebook, 3)])
def test_it_is_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)


class SynchronizedStatistics(Mixed):
    """Gradients pass from rank to rank through a layer."""

    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization(synchronized=True)
        self.norm.build((None, CLASSES))

    def call(self, x, training=False):
        return self.norm(super().call(x), training=training)


@pytest.mark.usefixtures("float64")
@grid((2, 2))
@pytest.mark.parametrize("size", [37, exhaustive(33)])
def test_statistics_of_the_global_batch(devices, zero_stage, size):
    def program(strategy):
        return fit(strategy, SynchronizedStatistics, size=size)

    assert_as_on_one_device(program, zero_stage, devices)
