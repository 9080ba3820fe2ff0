"""Programs around the training: callbacks that search, average and prune, optimizers of one's own, training in phases."""

import contextlib

import keras
import numpy as np
import pytest
from grids import exhaustive
from keras import layers, ops
from training import one_device

from tests.parity.comparison import BatchLogs
from tests.programs.comparing import assert_as_on_one_device
from tests.programs.small_training import BATCH, ROWS, adam, fitted, integers, mlp, normal, sgd

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


class Sophia(keras.optimizers.Optimizer):
    """An optimizer of one's own: two slots, a step that is clipped element by element, slower in layers further below."""

    def __init__(self, rate=0.02, slow=(), **arguments):
        super().__init__(learning_rate=rate, name="sophia", **arguments)
        self.slow = slow

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.momenta, self.curvatures = self.add_optimizer_variables(variables, ["momentum", "curvature"])

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        momentum, curvature = self.momenta[index], self.curvatures[index]
        rate = ops.cast(learning_rate, variable.dtype) * (
            0.3 if any(name in self._trainable_variables[index].path for name in self.slow) else 1.0
        )
        gradient = ops.cast(gradient, variable.dtype)
        self.assign_add(momentum, ops.multiply(gradient - momentum, 0.1))
        self.assign_add(curvature, ops.multiply(ops.square(gradient) - curvature, 0.05))
        self.assign_sub(variable, rate * ops.clip(momentum / (curvature + 1e-2), -1.0, 1.0))


def with_everything(strategy):
    """Recomputation, accumulation, averages and clipping together, with several steps per execution."""

    class Block(layers.Layer):
        def __init__(self, name):
            super().__init__(name=name)
            self.norm, self.one, self.two = layers.LayerNormalization(), layers.Dense(8, "gelu"), layers.Dense(4)

        def build(self, shape):
            self.norm.build(shape)
            self.one.build(shape)
            self.two.build((*shape[:-1], 8))

        def call(self, x):
            return x + self.two(self.one(self.norm(x)))

    settings = {"gradient_accumulation_steps": 2, "use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3}
    with strategy.scope():
        # On one device Keras's own recomputation refuses a layer of layers in a graph.
        with keras.RematScope(mode="full") if strategy is not one_device() else contextlib.nullcontext():
            blocks = [Block("lower"), Block("upper")]
        model = keras.Sequential([keras.Input((4,)), *blocks, layers.Dense(2)])
        model.compile(Sophia(slow=("lower",), global_clipnorm=0.5, **settings), "mse", steps_per_execution=2)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    return fitted(model, normal(4), normal(2, seed=2), epochs=3, validation_split=0.2, callbacks=[swap])


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


def pseudo_labels(strategy):
    """Self-training: what the model is sure of becomes data; the classes weigh as they are frequent."""
    with strategy.scope():
        model = keras.Sequential([mlp(6, 3), layers.Softmax()])
        model.compile(adam(), "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    x, y, other = normal(4), integers(3), normal(4, seed=9)
    found = [fitted(model, x, y, epochs=3)]
    predicted = model.predict(other, batch_size=BATCH, verbose=0)
    sure = predicted.max(1) > 0.4
    both = np.concatenate([x, other[sure]]), np.concatenate([y, predicted[sure].argmax(1)])
    weights = {label: 1.0 + 0.1 * int((both[1] == label).sum()) for label in range(3)}
    return found, sure.sum(), fitted(model, *both, class_weight=weights)


def cross_validation(strategy):
    """Three folds, each with a clone of one model, which is evaluated on what it has not seen; the best goes on."""
    x, y = normal(4), normal(2, seed=2)
    with strategy.scope():
        first = mlp(6, 2)
    found = []
    for fold in range(3):
        held = np.arange(ROWS) % 3 == fold
        with strategy.scope():
            model = keras.models.clone_model(first)
            model.set_weights(first.get_weights())
            model.compile(adam(), "mae")
        fitted(model, x[~held], y[~held], batch_size=6)
        found.append((model.evaluate(x[held], y[held], batch_size=3, verbose=0), model.get_weights()))
    first.set_weights(min(found, key=lambda pair: pair[0])[1])
    with strategy.scope():
        first.compile(sgd(), "mse", loss_weights=0.5)
    return found, fitted(first, x, y)


PROGRAMS = (
    rate_finder, averaged_weights, pruned, with_everything, scheduled_in_executions, annealed_divergence, pseudo_labels,
    cross_validation,
)  # fmt: skip


@pytest.mark.parametrize(
    ("program", "zero_stage", "devices"),
    [exhaustive(program, stage, devices) for program in PROGRAMS for stage, devices in ((0, 4), (3, 2))],
)
def test_it_is_one_device(program, zero_stage, devices):
    assert_as_on_one_device(program, zero_stage, devices)
