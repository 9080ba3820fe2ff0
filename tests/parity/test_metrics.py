"""Metrics of every kind, in `fit`, `evaluate` and on single batches: what one device logs, after every batch and epoch."""

import functools

import keras
import numpy as np
import pytest
from grids import exhaustive
from training import FEATURES, one_device, strategy_for, vectors

from tests.parity.comparison import BatchLogs, assert_same_tree, state

pytestmark = pytest.mark.as_traced

ROWS = 37
X, Y = vectors(ROWS)
LABELS = (Y % 2).astype("float32")[:, None]
WEIGHTS = np.linspace(0.1, 2.0, ROWS).astype("float32")


class CountOfLarge(keras.metrics.Metric):
    """A metric of one's own."""

    def __init__(self, name="large"):
        super().__init__(name=name)
        self.count = self.add_weight(name="count", initializer="zeros")
        self.histogram = self.add_weight(name="histogram", shape=(3,), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        large = keras.ops.cast(y_pred > 0.5, "float32")
        self.count.assign_add(keras.ops.sum(large))
        self.histogram.assign_add(keras.ops.sum(large) * keras.ops.convert_to_tensor([1.0, 2.0, 3.0]))

    def result(self):
        return self.count + keras.ops.sum(self.histogram) / 6


def metrics():
    kinds = keras.metrics
    return [
        kinds.BinaryAccuracy(name="accuracy"),
        kinds.AUC(name="auc", num_thresholds=20),
        kinds.Precision(name="precision"),
        kinds.TruePositives(name="tp"),
        kinds.SensitivityAtSpecificity(0.5, num_thresholds=20, name="sensitivity"),
        kinds.F1Score(threshold=0.5, name="f1"),
        kinds.MeanIoU(2, name="mean_iou"),
        kinds.RootMeanSquaredError(name="rmse"),
        kinds.R2Score(name="r2"),
        kinds.MeanMetricWrapper(lambda y, p: keras.ops.abs(y - p), name="wrapped"),
        kinds.PearsonCorrelation(name="pearson"),
        CountOfLarge(),
    ]


def train(strategy, asks_batches=True, **settings):
    """Batches of 12, 12, 12 and 1: of the last one all ranks but one have no example."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, activation="sigmoid")])
        weighted = [keras.metrics.BinaryAccuracy(name="weighted"), keras.metrics.AUC(name="weighted_auc", num_thresholds=20)]
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
        model.compile(optimizer, "binary_crossentropy", metrics=metrics(), weighted_metrics=weighted, **settings)
    logs = BatchLogs()
    arguments = {"sample_weight": WEIGHTS, "batch_size": 12, "verbose": 0}
    history = model.fit(X, LABELS, shuffle=False, validation_data=(X, LABELS, WEIGHTS), callbacks=[logs], **arguments)
    found = {
        "history": history.history,
        "after each batch": logs.train,
        "after each batch of validation": logs.test,
        "evaluate": model.evaluate(X, LABELS, return_dict=True, **arguments),
        **state(model),
    }
    return {**found, "batches": of_batches(model)} if asks_batches else found


def of_batches(model):
    return {
        "train_on_batch": as_numbers(model.train_on_batch(X[:7], LABELS[:7], return_dict=True)),
        "test_on_batch": as_numbers(model.test_on_batch(X[:7], LABELS[:7], return_dict=True)),
        **state(model),
    }


def as_numbers(logs):
    return {name: np.asarray(value) for name, value in logs.items()}


@functools.cache
def on_one_device():
    return train(one_device())


@pytest.mark.parametrize(
    ("zero_stage", "devices", "asks_batches"), [exhaustive(3, 3, False), exhaustive(3, 3, True), exhaustive(0, 2, True)]
)
def test_metrics_of_every_kind(zero_stage, devices, asks_batches):
    expected = on_one_device()
    assert expected["after each batch"][0]["auc"] != expected["after each batch"][1]["auc"]
    found = train(strategy_for(devices, zero_stage), asks_batches)
    assert_same_tree(found, expected if asks_batches else {name: expected[name] for name in expected if name != "batches"})


@pytest.mark.exhaustive
def test_metrics_of_an_eager_step():
    """Also of single batches."""
    assert_same_tree(train(strategy_for(2, 3), run_eagerly=True), on_one_device())


def test_other_logs_of_a_custom_step_are_those_of_one_device():
    class Custom(keras.Model):
        def train_step(self, data):
            logs = super().train_step(data)
            return {**logs, "rows": keras.ops.cast(keras.ops.shape(data[0])[0], "float32")}

    with strategy_for(2, 2).scope():
        inputs = keras.Input((FEATURES,))
        model = Custom(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
    logs = BatchLogs()
    model.fit(X[:11], LABELS[:11], batch_size=11, verbose=0, callbacks=[logs])
    assert logs.train[0]["rows"] == 11  # of ranks with six and five
