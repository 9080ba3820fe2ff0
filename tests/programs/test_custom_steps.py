"""Steps of one's own in `fit`: `train_step`, `test_step` and `compute_loss` as Keras's guides write them, on uneven batches.

Batches of 16 of 37 examples leave a last one of 5, and of 33 one of 1, so that all ranks but one have no rows.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import CLASSES, FEATURES, vectors

from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import assert_as_on_one_device

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("float64")]

BATCH = 16
GRID = pytest.mark.parametrize(("devices", "zero_stage"), [(2, 0), (2, 3), exhaustive(4, 1), exhaustive(2, 2), exhaustive(4, 3)])


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


def fit(strategy, build, size=37, epochs=2, weighted=False, evaluates=True, **compile_arguments):
    x, y = vectors(size)
    with strategy.scope():
        model = build()
        settings = {"optimizer": keras.optimizers.Adam(0.01), "loss": crossentropy()} | compile_arguments
        model.compile(**settings)
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


@GRID
def test_a_step_that_tracks_its_loss(devices, zero_stage):
    def program(strategy):
        return fit(strategy, Tracked)

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


@GRID
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


@GRID
@pytest.mark.parametrize("size", [37, 33])
def test_sums_of_losses_and_means(devices, zero_stage, size):
    def program(strategy):
        return fit(strategy, Mixed, size=size)

    assert_as_on_one_device(program, zero_stage, devices)
