"""Every metric of Keras, in `fit`, `evaluate` and their logs: batches of 12, 12, 5 and 1 rows, with weights and without."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive

from tests.parity.comparison import BatchLogs
from tests.programs.comparing import assert_as_on_one_device

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300)]

kinds, ops = keras.metrics, keras.ops
ROWS, CLASSES = 30, 4
rng = np.random.default_rng(5)
LABELS = rng.integers(0, CLASSES, ROWS)
SCORES = rng.random((ROWS, CLASSES)).astype("float32")
SCORES /= SCORES.sum(-1, keepdims=True)
WEIGHTS = np.linspace(0.5, 2, ROWS).astype("float32")

# What is evaluated: predictions, targets, and metrics of them.
BINARY = {
    "AUC": {"num_thresholds": 20},
    "BinaryAccuracy": {},
    "BinaryCrossentropy": {},
    "FalseNegatives": {},
    "FalsePositives": {"thresholds": [0.2, 0.6]},
    "Hinge": {},
    "Precision": {},
    "PrecisionAtRecall": {"recall": 0.5, "num_thresholds": 20},
    "Recall": {},
    "RecallAtPrecision": {"precision": 0.5, "num_thresholds": 20},
    "SensitivityAtSpecificity": {"specificity": 0.5, "num_thresholds": 20},
    "SpecificityAtSensitivity": {"sensitivity": 0.5, "num_thresholds": 20},
    "SquaredHinge": {},
    "TrueNegatives": {},
    "TruePositives": {},
}
ONE_HOT = {
    "CategoricalAccuracy": {},
    "CategoricalCrossentropy": {},
    "CategoricalHinge": {},
    "F1Score": {"average": "weighted", "threshold": 0.3},
    "FBetaScore": {"beta": 0.5, "average": "macro"},
    "KLDivergence": {},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "TopKCategoricalAccuracy": {"k": 2},
}
INTEGERS = {
    "SparseCategoricalAccuracy": {},
    "SparseCategoricalCrossentropy": {},
    "SparseTopKCategoricalAccuracy": {"k": 2},
}
NUMBERS = {
    "ConcordanceCorrelation": {},
    "CosineSimilarity": {},
    "LogCoshError": {},
    "MeanAbsoluteError": {},
    "MeanAbsolutePercentageError": {},
    "MeanSquaredError": {},
    "MeanSquaredLogarithmicError": {},
    "PearsonCorrelation": {},
    "Poisson": {},
    "R2Score": {},
    "RootMeanSquaredError": {},
}
IDS = {
    "Accuracy": {},
    "BinaryIoU": {"target_class_ids": [0, 1], "threshold": 0.5},
    "IoU": {"num_classes": CLASSES, "target_class_ids": [1]},
    "MeanIoU": {"num_classes": CLASSES},
}
KINDS = {
    "binary": (SCORES[:, :1] * 2, (LABELS % 2)[:, None].astype("float32"), BINARY),
    "one_hot": (SCORES, np.eye(CLASSES, dtype="float32")[LABELS], ONE_HOT),
    "integers": (SCORES, LABELS, INTEGERS),
    "numbers": (SCORES, np.roll(SCORES, 1, 0) + 0.1, NUMBERS),  # of which no sum of correlations is near 0
    "ids": (LABELS[:, None].astype("float32"), np.roll(LABELS, 2)[:, None].astype("float32"), IDS),
    # Of predictions that are one vector Keras's functions return one number, which takes no weights.
    # Other settings of metrics that the tables have.
    "settings": (SCORES, np.eye(CLASSES, dtype="float32")[LABELS], None),
    "vectors": (SCORES[:, 0], np.roll(SCORES[:, 0], 3), dict.fromkeys(("MeanSquaredError", "RootMeanSquaredError"), {})),
}


class Largest(kinds.Metric):
    """A state that is a maximum, and one that counts batches."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable((), keras.initializers.Constant(-9.0), name="value")
        self.batches = self.add_variable((), "zeros", name="batches")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(y_pred - y_true) - 5))
        self.batches.assign_add(1)

    def reset_state(self):
        self.value.assign(-9.0)
        self.batches.assign(0)

    def result(self):
        return {"largest": ops.convert_to_tensor(self.value), "batches": ops.convert_to_tensor(self.batches)}


class Batches(kinds.Metric):
    """The mean over batches of each batch's own mean."""

    def __init__(self, name="batches"):
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", dtype="int32", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        weight = 1.0 if sample_weight is None else ops.max(sample_weight)
        self.total.assign_add(weight * ops.sqrt(ops.mean(ops.square(y_true - y_pred))))
        self.count.assign_add(1)

    def result(self):
        return self.total / ops.cast(self.count, "float32")


class Running(kinds.Metric):
    """A state with the aggregation "mean", one of the first rank, and one that is overwritten."""

    def __init__(self, name="running"):
        super().__init__(name=name)
        self.average = self.add_variable((), "zeros", aggregation="mean", name="average")
        self.first = self.add_variable((), "zeros", aggregation="only_first_replica", name="first")
        self.none = self.add_variable((), "zeros", aggregation="none", name="none")
        self.latest = self.add_variable((), "zeros", name="latest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.mean(ops.abs(y_true - y_pred))
        self.average.assign(0.9 * self.average + 0.1 * error)
        self.first.assign_add(error)
        self.none.assign_sub(error)
        self.latest.assign(error)

    def result(self):
        return self.average + 2 * self.first + 3 * self.none + 4 * self.latest


class Sums(kinds.Metric):
    """Updates that add up: nothing is sent."""

    def __init__(self, name="sums"):
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")
        self.by_class = self.add_variable((3,), "zeros", name="by_class")
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        values = ops.abs(y_true - y_pred)[:, 0]
        if sample_weight is not None:
            values = values * ops.cast(sample_weight, "float32")
        self.total.assign_add(ops.sum(values))
        self.by_class.assign(self.by_class + ops.sum(ops.where(y_pred > 0.5, y_pred, 0.0) * ops.ones((1, 3)), axis=0) / 2)
        self.rows.assign_add(ops.cast(ops.shape(y_true)[0], "float32"))

    def result(self):
        return self.total / self.rows + ops.sum(self.by_class)


def f1_of_a_batch(y_true, y_pred):
    hits = ops.sum(y_true * ops.round(y_pred))
    return 2 * hits / (ops.sum(y_true) + ops.sum(ops.round(y_pred)) + 1e-7)


def plain_mean(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred))


def of_rows(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def normalized_by_the_batch(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1) / ops.max(y_pred)


class Several(kinds.Metric):
    """States in a list, and metrics within a metric."""

    def __init__(self, name="several"):
        super().__init__(name=name)
        self.totals = [self.add_variable((), "zeros", name=f"total_{i}") for i in range(2)]
        self.inner = kinds.Mean(name="inner")
        self.extremes = {"least": self.add_variable((), keras.initializers.Constant(9.0), name="least")}

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.totals[0].assign_add(ops.sum(ops.abs(y_true - y_pred)))
        self.totals[1].assign_add(ops.cast(ops.size(y_pred), "float32"))
        self.inner.update_state(ops.square(y_true - y_pred), sample_weight)
        least = self.extremes["least"]
        least.assign(ops.minimum(least, ops.min(y_pred)))

    def reset_state(self):
        super().reset_state()
        self.inner.reset_state()
        self.extremes["least"].assign(9.0)

    def result(self):
        return self.totals[0] / self.totals[1] + self.inner.result() + 2 * self.extremes["least"]


OWN = (Several, Largest, Batches, Running, Sums)
FUNCTIONS = (f1_of_a_batch, plain_mean, of_rows, normalized_by_the_batch)


def nothing(y_true, y_pred):
    return ops.sum(0.0 * y_pred[:, None], axis=-1)


def settings():
    """Averages of every kind, curves of several labels, aggregations over outputs."""
    averages = [None, "micro", "macro", "weighted"]
    return [
        *(kinds.F1Score(average=average, threshold=0.3, name=f"f1_{average}") for average in averages),
        *(kinds.FBetaScore(average=average, beta=0.5, name=f"fbeta_{average}") for average in averages),
        kinds.AUC(num_thresholds=20, curve="PR", multi_label=True, num_labels=CLASSES, name="auc_of_labels"),
        kinds.AUC(num_thresholds=20, summation_method="majoring", label_weights=[0.1, 0.2, 0.3, 0.4], multi_label=True),
        *(kinds.R2Score(kind, name=f"r2_{kind}") for kind in ("uniform_average", "variance_weighted_average", None)),
        kinds.Precision(top_k=2, class_id=1, name="precision_at_2"),
        kinds.Recall(thresholds=[0.2, 0.5], class_id=2, name="recall_of_2"),
        kinds.PearsonCorrelation(axis=-1),
        kinds.ConcordanceCorrelation(axis=-1),
        kinds.CosineSimilarity(axis=-1),
        kinds.OneHotIoU(CLASSES, [1, 3], ignore_class=0, name="iou_without_0"),
        kinds.MeanMetricWrapper(of_rows, name="wrapped"),
    ]


def own():
    losses = [keras.losses.MeanSquaredError(name="mse_loss"), keras.losses.Dice(name="dice_loss")]
    return [*(kind() for kind in OWN), *FUNCTIONS, *losses]


class Scale(keras.layers.Layer):
    """Has a weight, so that there is something to train."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x * self.scale


WAYS = {"evaluate": {}, "fit": {}, "eager": {"run_eagerly": True}, "three steps": {"steps_per_execution": 3}}


def program_of(name, with_weights, way):
    def program(strategy):
        predictions, targets, metrics = KINDS["binary" if name == "own" else name]

        def make():
            if name in ("own", "settings"):
                return own() if name == "own" else settings()
            return [getattr(kinds, kind)(**arguments) for kind, arguments in metrics.items()]

        with strategy.scope():
            inputs = keras.Input(predictions.shape[1:])
            model = keras.Model(inputs, Scale()(inputs))
            weighted = make() if with_weights and name not in ("own", "vectors") else None
            model.compile("sgd", nothing, metrics=make(), weighted_metrics=weighted, **WAYS[way])
        logs = BatchLogs()
        weights = WEIGHTS if with_weights else np.ones_like(WEIGHTS)
        data = tf.data.Dataset.from_tensor_slices((predictions, targets, weights))
        batches = data.take(24).batch(12).concatenate(data.skip(24).take(5).batch(5)).concatenate(data.skip(29).batch(1))
        found = [model.evaluate(batches, verbose=0, return_dict=True, callbacks=[logs]) for _ in range(2)]
        if way != "evaluate":
            found.append(model.fit(batches, epochs=2, verbose=0, callbacks=[logs], validation_data=batches.take(3)).history)
        states = [np.asarray(v) for v in model.metrics_variables]
        return {"found": flat(found), "logs": [logs.train, logs.test], "states": states}

    program.__name__ = f"{name} {with_weights} {way}"
    return program


def flat(found):
    if isinstance(found, dict):
        return {name: flat(value) for name, value in found.items()}
    return [flat(value) for value in found] if isinstance(found, list) else np.asarray(found)


PROGRAMS = {
    (name, with_weights, way): program_of(name, with_weights, way)
    for name in (*KINDS, "own")
    for with_weights in (False, True)
    for way in WAYS
}


@pytest.mark.parametrize("devices", [2, exhaustive(3), exhaustive(4)])
@pytest.mark.parametrize("with_weights", [exhaustive(False), True])
@pytest.mark.parametrize(
    "name", ["own", "vectors", *map(exhaustive, ("ids", "binary", "one_hot", "integers", "numbers", "settings"))]
)
def test_it_is_one_device(name, with_weights, devices):
    assert_as_on_one_device(PROGRAMS[name, with_weights, "evaluate"], 0, devices)


@pytest.mark.parametrize("way", [exhaustive(way) for way in WAYS if way != "evaluate"])
@pytest.mark.parametrize("name", [exhaustive(name) for name in (*KINDS, "own")])
def test_other_ways(name, way):
    assert_as_on_one_device(PROGRAMS[name, True, way], 3, 2)


def test_the_tables_have_every_metric():
    """`Mean`, `Sum` and what wraps functions are in other tests."""
    found = {name for _, _, metrics in KINDS.values() for name in metrics or ()}
    others = {"Mean", "MeanMetricWrapper", "Metric", "Sum"}
    assert found | others == {name for name, kind in inspect.getmembers(kinds, inspect.isclass) if issubclass(kind, kinds.Metric)}
