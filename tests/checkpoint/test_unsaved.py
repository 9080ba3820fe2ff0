"""What is in no backup is warned of once."""

import warnings

import keras
import pytest
import tensorflow as tf

import tfdist
from tests.checkpoint.failing_fits import BATCH, X, Y
from tests.devices import names

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300)]


class Closed(keras.Model):
    """Its step trains the kernels with an optimizer that only the step knows."""

    def __init__(self, second):
        super().__init__()
        self.head = keras.layers.Dense(3)
        self._second = lambda: second
        self.build((None, 6))

    def build(self, shape):
        self.head.build(shape)
        super().build(shape)

    def call(self, x):
        return self.head(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        kernel, bias = tape.gradient(loss, [self.head.kernel, self.head.bias])
        self._second().apply([kernel], [self.head.kernel])
        self.optimizer.apply([bias], [self.head.bias])
        return {"loss": loss}


@pytest.mark.parametrize("is_attribute", [False, True])
def test_an_optimizer_that_is_in_no_backup_is_told_of_once(is_attribute, tmp_path):
    """Its momentum began anew without a word. One that has trained the model before this `fit` is not meant."""
    strategy = tfdist.ShardedStrategy(names(2), zero_stage=1)
    with strategy.scope():
        second = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9, name="own"))
        model = Closed(second)
        earlier = keras.optimizers.SGD(0.1, name="earlier")
        model.compile(earlier, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(X, Y, batch_size=8, verbose=0)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if is_attribute:
            model.second_optimizer = second
    with warnings.catch_warnings(record=True, action="always") as caught:
        backup = keras.callbacks.BackupAndRestore(tmp_path, save_freq="epoch")
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[backup])
    told = [str(warning.message) for warning in caught if "is in no backup" in str(warning.message)]
    assert len(told) == (0 if is_attribute else 1), told
    if told:
        assert f"The state of the optimizer {second.name!r} (LossScaleOptimizer) is in no backup" in told[0]
        assert "model.second_optimizer = optimizer" in told[0]


class Noise(keras.layers.Layer):
    """Noise by TensorFlow's random operations, or by Keras's with a generator of the layer."""

    def __init__(self, is_of_keras):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)
        self.is_of_keras = is_of_keras

    def call(self, x):
        shape = tf.shape(x)
        return x + (keras.random.normal(shape, seed=self.seeds) if self.is_of_keras else tf.random.normal(shape))


@pytest.mark.parametrize("is_of_keras", [False, True])
def test_draws_that_no_backup_has_are_told_of_once(is_of_keras, tmp_path):
    with tfdist.ShardedStrategy(names(2)).scope():
        model = keras.Sequential([keras.Input((6,)), Noise(is_of_keras), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with warnings.catch_warnings(record=True, action="always") as caught:
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    told = [str(warning.message) for warning in caught if "TensorFlow's stateful random operations" in str(warning.message)]
    assert len(told) == (0 if is_of_keras else 1)
