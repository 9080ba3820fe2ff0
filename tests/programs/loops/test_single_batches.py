"""`train_on_batch` and `test_on_batch`: what they return, what they train, and what metrics have counted, are one device's."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import vectors

from tests.parity.comparison import state
from tests.programs.comparing import SHARDED, assert_as_on_one_device
from tests.programs.metrics.test_every_metric import Batches, Largest, f1_of_a_batch

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(180)]

X, Y = vectors(24)
LABELS = (Y % 2).astype("float32")[:, None]
WEIGHTS = np.linspace(0.5, 2, 24).astype("float32")


def counting():
    kinds = keras.metrics
    return [kinds.TruePositives(name="tp"), kinds.AUC(num_thresholds=20, name="auc"), kinds.BinaryIoU([0, 1], name="iou"),
            Largest(), Batches(), f1_of_a_batch]  # fmt: skip


def classifier():
    return keras.Sequential(
        [
            keras.Input((15,)),
            keras.layers.Dense(6, activation="tanh", kernel_regularizer="l2", activity_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


def numbers(value):
    if isinstance(value, dict):
        return {name: numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [numbers(one) for one in value]
    return np.asarray(value, "float64")


def root_of_the_mean(y_true, y_pred):
    return tf.sqrt(tf.reduce_mean(tf.square(y_true - y_pred)) + 0.1)


def compiled(loss, **settings):
    """Batches of 8, 5 and 1 rows, with weights of classes, of rows and none; between them `evaluate`."""

    def program(strategy):
        with strategy.scope():
            model = classifier()
            metrics = {"metrics": counting(), "weighted_metrics": [keras.metrics.FalsePositives(name="fp")]}
            model.compile(keras.optimizers.Adam(0.02), loss(), **metrics, **settings)
        found = []

        def note(logs):
            read = {metric.name: metric.result() for metric in model.metrics}
            found.append(numbers({"logs": logs, "read": read, "states": [np.asarray(v) for v in model.metrics_variables]}))

        note(model.train_on_batch(X[:8], LABELS[:8], return_dict=True))
        note(model.train_on_batch(X[8:13], LABELS[8:13], sample_weight=WEIGHTS[:5], return_dict=True))
        note(model.test_on_batch(X[:5], LABELS[:5], sample_weight=WEIGHTS[:5], return_dict=True))
        if loss is not of_the_batch:
            note(model.evaluate(X, LABELS, batch_size=7, verbose=0, return_dict=True))
        note(model.train_on_batch(X[:1], LABELS[:1], class_weight={0: 1.0, 1: 3.0}, return_dict=True))
        note(model.test_on_batch(X[:1], LABELS[:1], return_dict=True))
        return {"found": found, **state(model)}

    program.__name__ = getattr(loss, "__name__", str(loss))
    return program


class OwnStep(keras.Model):
    """Sums of losses, trackers with and without weights, and a number that is no mean over rows."""

    def __init__(self):
        super().__init__()
        self.head = keras.layers.Dense(1, activation="sigmoid", kernel_regularizer="l2")
        self.head.build((None, 15))
        self.built = True
        kinds = keras.metrics
        self.trackers = [kinds.Mean(name="mean"), kinds.Sum(name="sum"), kinds.Mean(name="weighted")]
        self.positives = kinds.TruePositives(name="tp")

    @property
    def metrics(self):
        return [*self.trackers, self.positives]

    def loss_of(self, x, y):
        y_pred = self.head(x)
        loss = keras.losses.MeanSquaredError(reduction="sum")(y, y_pred) / 6
        loss += tf.nn.compute_average_loss(keras.losses.binary_crossentropy(y, y_pred), global_batch_size=6)
        loss += tf.reduce_sum(tf.square(y_pred)) / 6 + sum(self.losses) + root_of_the_mean(y, y_pred)
        self.positives.update_state(y, y_pred)
        self.trackers[0].update_state(loss)
        self.trackers[1].update_state(loss)
        self.trackers[2].update_state(loss, sample_weight=3.0)
        return loss

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, **{metric.name: metric.result() for metric in self.metrics}}

    def test_step(self, data):
        return {"loss": self.loss_of(*data[:2])}


def stepping(**settings):
    def program(strategy):
        with strategy.scope():
            model = OwnStep()
            model.compile(keras.optimizers.SGD(0.1), **settings)
        found = []
        for rows in (slice(0, 6), slice(6, 11), slice(11, 12)):
            for method in (model.train_on_batch, model.test_on_batch):
                logs = method(X[rows], LABELS[rows], return_dict=True)
                states = [np.asarray(v) for v in model.metrics_variables]
                found.append(numbers({"logs": logs, "states": states}))
        return {"found": found, **state(model)}

    return program


def mean():
    return "binary_crossentropy"


def total():
    return keras.losses.MeanSquaredError(reduction="sum")


def of_the_batch():
    return root_of_the_mean


COMPILED = {loss.__name__: compiled(loss) for loss in (mean, total, of_the_batch)} | {"eager": compiled(mean, run_eagerly=True)}
STEPPING = {"traced": stepping(), "eager": stepping(run_eagerly=True)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("devices", [2, 3])
def test_compiled(name, zero_stage, devices):
    assert_as_on_one_device(COMPILED[name], zero_stage, devices, rtol=3e-5)


@pytest.mark.parametrize("zero_stage", SHARDED)
@pytest.mark.parametrize("step_losses", ["mean", exhaustive("sum")])
@pytest.mark.parametrize("name", ["traced", exhaustive("eager")])
def test_steps_of_ones_own(name, zero_stage, step_losses):
    assert_as_on_one_device(STEPPING[name], zero_stage, step_losses=step_losses)
