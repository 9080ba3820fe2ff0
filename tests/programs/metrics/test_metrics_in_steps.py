"""Metrics in custom steps and training loops: results are those of the global batch, wherever they are asked for."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import vectors

from tests.parity.comparison import BatchLogs
from tests.programs.comparing import assert_as_on_one_device

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300)]

ROWS = 27  # batches of 12, 12 and 3: uneven parts
X, Y = vectors(ROWS)
LABELS = (Y % 2).astype("float32")[:, None]
ops = keras.ops


class Step(keras.Model):
    """A classifier with a step of its own; subclasses say what it logs."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, activation="sigmoid")
        self.auc = keras.metrics.AUC(num_thresholds=20, name="auc")
        self.precision = keras.metrics.Precision(name="precision")
        self.tracker = keras.metrics.Mean(name="squares")
        self.confusion = keras.metrics.MeanIoU(2, name="iou")
        self.largest = Largest()

    def call(self, x):
        return self.dense(x)

    @property
    def metrics(self):
        return [self.auc, self.precision, self.tracker, self.confusion, self.largest]

    def update(self, y, predictions):
        self.auc.update_state(y, predictions)
        self.precision.update_state(y, predictions)
        self.tracker.update_state(ops.square(y - predictions))
        self.confusion.update_state(y, ops.cast(predictions > 0.5, "int32"))
        self.largest.update_state(predictions)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.compute_loss(x, y, predictions)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.update(y, predictions)
        return self.logged()

    def test_step(self, data):
        x, y = data
        self.update(y, self(x, training=False))
        return self.logged()

    def logged(self):
        return {metric.name: metric.result() for metric in self.metrics}


class Largest(keras.metrics.Metric):
    """A state that is a maximum, of negative numbers."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable(shape=(), initializer=keras.initializers.Constant(-100.0), name="value")

    def update_state(self, values, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(values) - 2.0))

    def reset_state(self):
        self.value.assign(-100.0)

    def result(self):
        return self.value


class Renamed(Step):
    """Other names, numbers computed of results."""

    def logged(self):
        return {
            "area": self.auc.result(),
            "twice": 2 * self.precision.result(),
            "root": ops.sqrt(self.tracker.result()),
            "smallest_of_two": ops.minimum(self.auc.result(), self.confusion.result()),
        }


class Added(keras.Model):
    """What Keras's own step logs, and more."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, activation="sigmoid")
        self.auc = keras.metrics.AUC(num_thresholds=20, name="auc")

    def call(self, x):
        return self.dense(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.auc.update_state(y, y_pred)
        results["auc"] = self.auc.result()
        return results

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "perplexity": ops.exp(logs["loss"]), "odds": logs["precision"] / (1.1 - logs["precision"])}


def fit(make, metrics=None, **settings):
    def program(strategy):
        with strategy.scope():
            model = make()
            compiled = ["mae", keras.metrics.Precision()] if metrics is None else metrics
            model.compile(keras.optimizers.SGD(0.3), "binary_crossentropy", metrics=compiled, **settings)
        logs = BatchLogs()
        history = model.fit(
            X, LABELS, batch_size=12, epochs=2, shuffle=False, verbose=0, callbacks=[logs], validation_data=(X[:7], LABELS[:7])
        )
        evaluated = model.evaluate(X, LABELS, batch_size=12, verbose=0, return_dict=True)
        return {
            "history": {name: flat(values) for name, values in history.history.items()},
            "batches": logs.train,
            "tests": logs.test,
            "evaluate": {name: flat(value) for name, value in evaluated.items()},
            "states": [np.asarray(variable) for variable in model.metrics_variables],
            "weights": model.get_weights(),
        }

    program.__name__ = make.__name__
    return program


def flat(values):
    return [float(np.asarray(value)) for value in tf.nest.flatten(values)]


def from_outside(kind=Step):
    """Metrics that are made outside `scope()`: one is attached to the model, others are not, one has counted before."""
    auc, precision = keras.metrics.AUC(num_thresholds=20, name="auc"), keras.metrics.Precision(name="precision")
    hits, largest = keras.metrics.BinaryAccuracy(name="hits"), Largest()
    hits.update_state(LABELS, LABELS)

    class FromOutside(kind):
        def __init__(self):
            super().__init__()
            self.auc, self.largest = auc, largest

        def update(self, y, predictions):
            super().update(y, predictions)
            hits.update_state(y, predictions)
            precision.update_state(y, predictions)

        def logged(self):
            return {**super().logged(), "hits": hits.result(), "closure": precision.result()}

    return FromOutside


def of_outside(**settings):
    def program(strategy):
        kind = from_outside()
        compiled = [Largest(name="compiled"), keras.metrics.AUC(num_thresholds=20, name="area")]
        found = fit(kind, metrics=compiled, **settings)(strategy)
        return found, [float(metric.result()) for metric in compiled]

    return program


PROGRAMS = {
    "results": fit(Step),
    "from outside": of_outside(),
    "from outside, eager": of_outside(run_eagerly=True),
    "from outside, several steps": of_outside(steps_per_execution=2),
    "renamed": fit(Renamed),
    "added": fit(Added),
    "eager": fit(Step, run_eagerly=True),
    "several_steps": fit(Step, steps_per_execution=2),
}


EXHAUSTIVE = ("results", "renamed", "eager", "several_steps", "from outside, eager", "from outside, several steps")


def _cases():
    """Each program at one of the stages in turns: no stage shards a metric. "from outside" has all that "results" has."""
    for place, name in enumerate(PROGRAMS):
        for stage in range(4):
            yield (name, stage) if name not in EXHAUSTIVE and stage == 3 * (place % 2) else exhaustive(name, stage)


@pytest.mark.parametrize(("name", "zero_stage"), list(_cases()))
def test_logs_of_a_step(name, zero_stage):
    assert_as_on_one_device(PROGRAMS[name], zero_stage)


def by_hand(strategy):
    """Updated outside `run`, inside of it, and outside again."""
    with strategy.scope():
        metrics = [keras.metrics.MeanIoU(3), keras.metrics.Mean(), Largest(), keras.metrics.AUC(num_thresholds=20)]
    true, predicted = (Y % 3)[:, None], ((Y + X[:, 0] > 3) % 3)[:, None]
    arguments = [(true, predicted), (X[:, 1],), (X[:, 1],), (LABELS, 1 / (1 + np.exp(-X[:, :1])))]
    found = []

    def update(rows):
        for metric, given in zip(metrics, arguments, strict=True):
            metric.update_state(*(value[rows] for value in given))
        found.append([float(metric.result()) for metric in metrics])

    update(slice(0, 5))
    update(slice(5, 9))
    dataset = tf.data.Dataset.from_tensor_slices(tuple(arguments)).batch(7)

    @tf.function
    def step(batch):
        def of_rank(batch):
            for metric, given in zip(metrics, batch, strict=True):
                metric.update_state(*given)
            return [tf.cast(metric.result(), tf.float32) for metric in metrics]

        results = strategy.run(of_rank, args=(batch,))
        return [strategy.reduce("MEAN", result, axis=None) for result in results]

    for batch in strategy.experimental_distribute_dataset(dataset):
        found.append([float(result) for result in step(batch)])
    found.append([float(metric.result()) for metric in metrics])
    update(slice(3, 20))
    for metric in metrics:
        metric.reset_state()
    update(slice(1, 8))
    return found


@pytest.mark.parametrize("devices", [2, exhaustive(3)])
def test_updated_by_hand(devices):
    assert_as_on_one_device(by_hand, 3, devices)
