"""Custom steps in `fit`: `train_step`, `test_step` and `compute_loss` as Keras's guides write them, on uneven batches.

Batches of 16 of 37 examples leave a last one of 5, and of 33 one of 1, so that all ranks but one have no rows.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import CLASSES, FEATURES, vectors

import tfdist
from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import assert_as_on_one_device

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(180), pytest.mark.usefixtures("float64")]

BATCH = 16
CASES = [(2, 0), (4, 1), (2, 2), (2, 3), (4, 3)]


def grid(*chosen):
    """All cases of devices and stages, of which those `chosen` run by default."""
    cases = [case if case in chosen else exhaustive(*case) for case in CASES]
    return pytest.mark.parametrize(("devices", "zero_stage"), cases)


class Model(keras.Model):
    """A small network to derive steps from."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.hidden = keras.layers.Dense(9, activation="tanh", kernel_regularizer=self.regularizer())
        self.head = keras.layers.Dense(CLASSES)
        self.hidden.build((None, FEATURES))
        self.head.build((None, 9))
        self.built = True

    def regularizer(self):
        return None

    def call(self, x):
        return self.head(self.hidden(x))


def crossentropy(**arguments):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def adam():
    return keras.optimizers.Adam(0.01)


def fit(strategy, build, size=37, epochs=2, weighted=False, evaluates=True, optimizer=adam, **compile_arguments):
    x, y = vectors(size)
    with strategy.scope():
        model = build()
        settings = {"loss": crossentropy()} | compile_arguments
        model.compile(optimizer(), **settings)
    logs = BatchLogs()
    weights = np.linspace(0.0, 5.0, size) if weighted else None
    arrays = {"batch_size": BATCH, "verbose": 0, "sample_weight": weights, "callbacks": [logs]}
    history = model.fit(x, y, epochs=epochs, shuffle=False, **arrays).history
    evaluated = model.evaluate(x, y, return_dict=True, **arrays) if evaluates else {}
    return {"history": history, "evaluated": evaluated, "train": logs.train, "test": logs.test, **state(model)}


class Tracked(Model):
    """Keras's guide "Customizing what happens in fit", first version."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@grid()  # as the loss and the metrics of `OwnTrackers`
def test_a_step_that_tracks_its_loss(devices, zero_stage):
    def program(strategy):
        return fit(strategy, Tracked, metrics=["accuracy"])

    assert_as_on_one_device(program, zero_stage, devices)


class OwnTrackers(Model):
    """The guide's second version: a loss object called directly, trackers of one's own, a test step, sample weights."""

    def __init__(self):
        super().__init__()
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = crossentropy()

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae]

    def logs(self, loss, y, y_pred):
        self.loss_tracker.update_state(loss)
        self.mae.update_state(keras.ops.one_hot(y, CLASSES), y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae.result()}

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred, sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.logs(loss, y, y_pred)

    def test_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        return self.logs(self.loss_fn(y, y_pred, sample_weight), y, y_pred)


@grid((2, 3))
def test_a_loss_object_with_sample_weights(devices, zero_stage):
    def program(strategy):
        return fit(strategy, OwnTrackers, weighted=True, loss=None)

    assert_as_on_one_device(program, zero_stage, devices)


class Mixed(Model):
    """A Keras loss, a plain mean and a penalty in one sum, and raw numbers for logs."""

    def regularizer(self):
        return keras.regularizers.L2(0.01)

    def loss_of(self, x, y, training):
        y_pred = self(x, training=training)
        plain = tf.reduce_mean(tf.reduce_sum(tf.square(y_pred), axis=-1))
        loss = crossentropy()(y, y_pred) + 0.1 * plain + sum(self.losses)
        return loss, plain

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss, plain = self.loss_of(x, y, True)
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"total": loss, "plain": plain}

    def test_step(self, data):
        loss, plain = self.loss_of(*data[:2], False)
        return {"total": loss, "plain": plain}


@grid((2, 3))
@pytest.mark.parametrize("size", [exhaustive(37), 33])
def test_sums_of_losses_and_means(devices, zero_stage, size):
    def program(strategy):
        return fit(strategy, Mixed, size=size)

    assert_as_on_one_device(program, zero_stage, devices)


class OverriddenLoss(Model):
    """`compute_loss` of one's own: a plain mean, with a tracker, which Keras's own steps train and test with."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="plain")
        self.scale = self.add_weight(name="scale", initializer="ones")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        plain = tf.reduce_mean(tf.square(y_pred - keras.ops.one_hot(y, CLASSES)))
        self.tracker.update_state(plain)
        return plain * tf.exp(-self.scale) + self.scale  # NaN where a rank has no rows


class Penalized(Model):
    """What `compute_loss` gives, and a penalty of weights."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * sum(tf.reduce_sum(tf.square(weight)) for weight in self.trainable_weights)


class Adding(Model):
    """Losses that the model adds in its call."""

    def regularizer(self):
        return "l2"

    def call(self, x):
        logits = super().call(x)
        self.add_loss(0.1 * tf.reduce_mean(tf.square(logits)))
        self.add_loss(0.1 * keras.losses.MeanSquaredError()(tf.zeros_like(logits), logits) + tf.reduce_mean(tf.abs(logits)))
        return logits


@grid((2, 2))
@pytest.mark.parametrize("build", [OverriddenLoss, exhaustive(Penalized), exhaustive(Adding)])
def test_losses_of_ones_own(devices, zero_stage, build):
    def program(strategy):
        return fit(strategy, build, size=33)

    assert_as_on_one_device(program, zero_stage, devices)


class Inherited(Tracked):
    """Keras's own step and then one of one's own on the same data, with another optimizer."""

    def __init__(self):
        super().__init__()
        self.second = keras.optimizers.SGD(0.05)

    def train_step(self, data):
        logs = keras.Model.train_step(self, data)
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True)))
        self.second.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {**logs, "second": loss}


class Accumulating(Tracked):
    """Two losses, each with a tape of its own, whose gradients are added; a decay of weights added to them by hand."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape(persistent=True) as tape:
            y_pred = self(x, training=True)
            first = self.compute_loss(y=y, y_pred=y_pred)
            second = tf.reduce_mean(tf.abs(y_pred))
        variables = self.trainable_variables
        gradients = [
            one + other for one, other in zip(tape.gradient(first, variables), tape.gradient(second, variables), strict=True)
        ]
        norm = tfdist.global_norm(gradients, variables)
        self.optimizer.apply(gradients, variables)
        return {"first": first, "second": second, "norm": norm}


def averaged_adam():
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.5, use_ema=True)


@grid((2, 0))
@pytest.mark.parametrize("build", [exhaustive(Inherited), Accumulating])
def test_several_losses_and_optimizers(devices, zero_stage, build):
    def program(strategy):
        return fit(strategy, build, size=33)

    assert_as_on_one_device(program, zero_stage, devices)


@grid()  # with a scaled loss: the next test
def test_accumulation_and_clipping(devices, zero_stage):
    def program(strategy):
        return fit(strategy, Mixed, size=37, optimizer=averaged_adam)

    assert_as_on_one_device(program, zero_stage, devices)


@grid((2, 0))
def test_scaled_losses(devices, zero_stage):
    def program(strategy):
        return fit(strategy, Mixed, optimizer=lambda: keras.optimizers.LossScaleOptimizer(averaged_adam(), initial_scale=8.0))

    assert_as_on_one_device(program, zero_stage, devices)


@grid((2, 3))
@pytest.mark.parametrize("build", [exhaustive(Mixed), Adding, exhaustive(OverriddenLoss), exhaustive(Inherited)])
def test_eagerly(devices, zero_stage, build):
    def program(strategy):
        return fit(strategy, build, size=33, epochs=1, run_eagerly=True)

    assert_as_on_one_device(program, zero_stage, devices)


@grid()  # by default: tests/parity/test_steps_per_execution.py
@pytest.mark.parametrize("build", [Mixed, OwnTrackers])
def test_several_steps_at_once(devices, zero_stage, build):
    def program(strategy):
        return fit(strategy, build, steps_per_execution=2)

    assert_as_on_one_device(program, zero_stage, devices)


@grid((2, 2))
def test_single_batches(devices, zero_stage):
    """`train_on_batch` gives the whole batch to every rank."""

    def program(strategy):
        x, y = vectors(5)
        with strategy.scope():
            model = Mixed()
            model.compile(keras.optimizers.Adam(0.01), crossentropy())
            model.optimizer.build(model.trainable_variables)
        trained = [model.train_on_batch(x, y, return_dict=True) for _ in range(2)]
        return {"trained": trained, "tested": model.test_on_batch(x, y, return_dict=True), **state(model)}

    assert_as_on_one_device(program, zero_stage, devices)
