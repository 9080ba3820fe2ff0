"""Callbacks that search a rate, average weights, prune, schedule, and set a variable that the loss reads."""

import keras
import numpy as np
import pytest
from grids import exhaustive
from keras import layers, ops

from tests.parity.comparison import BatchLogs
from tests.programs.comparing import assert_as_on_one_device
from tests.programs.small_training import BATCH, adam, fitted, integers, mlp, normal, sgd

pytestmark = pytest.mark.as_traced


class RateFinder(keras.callbacks.Callback):
    """Raises the rate with each batch, stops where the loss is high, and puts the weights back."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_begin(self, logs=None):
        self.before = self.model.get_weights()
        self.model.optimizer.learning_rate.assign(1e-3)

    def on_train_batch_end(self, batch, logs=None):
        rate = float(self.model.optimizer.learning_rate)
        self.found.append((rate, float(logs["loss"])))
        self.model.stop_training = logs["loss"] > 4 * self.found[0][1]
        self.model.optimizer.learning_rate = rate * 1.5

    def on_train_end(self, logs=None):
        self.model.set_weights(self.before)
        self.model.optimizer.learning_rate = min(self.found, key=lambda pair: pair[1])[0]


def rate_finder(strategy):
    with strategy.scope():
        model = mlp(6, 2)
        model.compile(sgd(), "mse")
    finder = RateFinder()
    fitted(model, normal(4), normal(2, seed=2), callbacks=[finder], epochs=4)
    return finder.found, fitted(model, normal(4), normal(2, seed=2))


class WeightAveraging(keras.callbacks.Callback):
    """Stochastic weight averaging: the mean of the weights at the ends of epochs, which the model has in the end."""

    def on_epoch_end(self, epoch, logs=None):
        weights = self.model.get_weights()
        if epoch == 1:
            self.mean = weights
        elif epoch > 1:
            self.mean = [mean + (new - mean) / epoch for mean, new in zip(self.mean, weights, strict=True)]

    def on_train_end(self, logs=None):
        self.model.set_weights(self.mean)


def averaged_weights(strategy):
    """With cyclical rates, and batches that then give the averaged model its statistics, as the paper has it."""
    with strategy.scope():
        norm = layers.BatchNormalization(momentum=0.5, synchronized=True)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(6), norm, layers.ReLU(), layers.Dense(2)])
        rate = keras.optimizers.schedules.CosineDecayRestarts(0.1, 3, t_mul=1.0)
        model.compile(keras.optimizers.SGD(rate, momentum=0.9, nesterov=True), "mse")
    x, y = normal(4), normal(2, seed=2)
    found = fitted(model, x, y, callbacks=[WeightAveraging()], epochs=4)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.0), "mse")
    return found, fitted(model, x, y), model.evaluate(x, y, batch_size=BATCH, verbose=0)


class Pruning(keras.callbacks.Callback):
    """After every batch the smallest weights of each kernel become zero, more of them in each epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.share = 0.2 * (epoch + 1)

    def on_train_batch_end(self, batch, logs=None):
        for layer in self.model.layers:
            kernel, bias = layer.get_weights()
            limit = np.quantile(np.abs(kernel), self.share)
            layer.set_weights([np.where(np.abs(kernel) < limit, 0.0, kernel), bias])
            layer.bias.assign(ops.clip(layer.bias, -0.1, 0.1))


def pruned(strategy):
    with strategy.scope():
        model = mlp(6, 5, 2)
        model.compile(adam(), "mse")
    return fitted(model, normal(4), normal(2, seed=2), callbacks=[Pruning()])


def scheduled_in_executions(strategy):
    """Callbacks of batches and epochs, where three steps are one execution."""
    logs = BatchLogs()
    rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5 if epoch else rate)
    with strategy.scope():
        model = mlp(6, 3)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(adam(), loss, metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)], steps_per_execution=3)
    found = fitted(model, normal(4), integers(3), batch_size=3, validation_split=0.3, callbacks=[rates, logs], epochs=3)
    return found, logs.train, logs.test


class Annealing(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.share.assign(min(1.0, 0.5 * epoch))
        self.model.temperature = 1.0 / (1 + epoch)


class Annealed(keras.Model):
    """A divergence that counts more in each epoch, by a variable that a callback sets; noise comes with the data."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = mlp(5, 4), mlp(5, 4, inputs=2)
        self.share = keras.Variable(0.0, trainable=False, name="share")

    def call(self, inputs):
        rows, noise = inputs
        mean, log_variance = ops.split(self.encode(rows), 2, axis=1)
        divergence = 0.5 * ops.sum(ops.square(mean) + ops.exp(log_variance) - 1 - log_variance, 1)
        self.add_loss(self.share * ops.mean(divergence))
        return self.decode(mean + ops.exp(0.5 * log_variance) * noise)


def annealed_divergence(strategy):
    with strategy.scope():
        model = Annealed()
        model.compile(adam(), "mse", metrics=["mae"])
    return fitted(model, (normal(4), normal(2, seed=5)), normal(4), callbacks=[Annealing()], epochs=3)


PROGRAMS = (rate_finder, averaged_weights, pruned, scheduled_in_executions, annealed_divergence)


@pytest.mark.parametrize(
    ("program", "zero_stage", "devices"),
    [exhaustive(program, stage, devices) for program in PROGRAMS for stage, devices in ((0, 4), (3, 2))],
)
def test_it_is_one_device(program, zero_stage, devices):
    assert_as_on_one_device(program, zero_stage, devices)
