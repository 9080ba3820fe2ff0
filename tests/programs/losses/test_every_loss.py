"""Losses of Keras with a value for each row, on an uneven last batch, weighted, masked and not: as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, losses

from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import SHARDED, assert_as_on_one_device
from tests.programs.fitting import BATCH, ROWS, Fitted

pytestmark = pytest.mark.as_traced

CLASSES = 4


def probabilities(rng):
    values = rng.uniform(0.1, 1.0, size=(ROWS, CLASSES))
    return (values / values.sum(axis=1, keepdims=True)).astype("float32")


def one_hot(rng):
    return np.eye(CLASSES, dtype="float32")[rng.integers(0, CLASSES, size=ROWS)]


def numbers(rng):
    return rng.normal(size=(ROWS, CLASSES)).astype("float32")


def signs(rng):
    return np.sign(rng.normal(size=(ROWS, CLASSES))).astype("float32")


def bits(rng):
    return rng.integers(0, 2, size=(ROWS, CLASSES)).astype("float32")


def labels(rng):
    return rng.integers(0, CLASSES, size=ROWS)


def case(name, targets, activation=None, weighted=False, **arguments):
    def data(rng):
        x, y = rng.normal(size=(ROWS, 6)).astype("float32"), targets(rng)
        return (x, y, rng.uniform(0.2, 2.0, size=ROWS).astype("float32")) if weighted else (x, y)

    def compiled():
        return {
            "optimizer": keras.optimizers.SGD(0.05),
            "loss": getattr(losses, name)(**arguments),
            "metrics": [] if targets is labels else ["mse"],
        }

    def build():
        return keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(CLASSES, activation)])

    label = ", ".join([name, *(f"{key}={value}" for key, value in arguments.items()), *(["weighted"] if weighted else [])])
    return Fitted(label, build, data, compiled)


KINDS = [
    ("MeanSquaredError", numbers, None, {}),
    ("MeanAbsoluteError", numbers, None, {}),
    ("MeanAbsolutePercentageError", probabilities, None, {}),
    ("MeanSquaredLogarithmicError", probabilities, "softplus", {}),
    ("Huber", numbers, None, {"delta": 0.5}),
    ("LogCosh", numbers, None, {}),
    ("CosineSimilarity", numbers, None, {}),
    ("Poisson", probabilities, "softplus", {}),
    ("KLDivergence", probabilities, "softmax", {}),
    ("BinaryCrossentropy", bits, None, {"from_logits": True, "label_smoothing": 0.1}),
    ("BinaryFocalCrossentropy", bits, "sigmoid", {}),
    ("CategoricalCrossentropy", one_hot, None, {"from_logits": True}),
    ("CategoricalFocalCrossentropy", one_hot, "softmax", {}),
    ("SparseCategoricalCrossentropy", labels, "softmax", {}),
    ("CategoricalHinge", one_hot, None, {}),
    ("Hinge", signs, None, {}),
    ("SquaredHinge", signs, None, {}),
    ("CategoricalGeneralizedCrossEntropy", labels, "softmax", {}),
]
REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight")
CASES = [case(name, targets, activation, **arguments) for name, targets, activation, arguments in KINDS]
CASES += [case(name, targets, activation, weighted=True, **arguments) for name, targets, activation, arguments in KINDS]
CASES += [
    case("MeanSquaredError", numbers, weighted=weighted, reduction=reduction)
    for reduction in REDUCTIONS
    for weighted in (False, True)
]


@pytest.mark.parametrize("program", [exhaustive(program) for program in CASES], ids=[program.name for program in CASES])
@pytest.mark.parametrize("devices", [2, 4])
def test_it_trains_as_on_one_device(program, devices):
    assert_as_on_one_device(program, 3 if devices == 2 else 0, devices, rtol=1e-4)


STEPS = 5  # in time, of which the last ones are masked


def every_loss():
    """Returns a loss of each kind, of those that take steps in time, with its targets and what its predictions are."""
    rng = np.random.default_rng(4)
    found = []
    for name, targets, activation, arguments in KINDS:
        for reduction in REDUCTIONS if name == "MeanSquaredError" else ("sum_over_batch_size",):
            by_step = [targets(rng) for _ in range(STEPS)]
            loss = getattr(losses, name)(reduction=reduction, name=f"{name}_{reduction}".lower(), **arguments)
            found.append((loss, np.stack(by_step, axis=1), activation or "linear"))
    return found


class AllLosses(keras.Model):
    """All losses in one step: called as they are, with the masks of predictions and weights of steps in time."""

    def __init__(self):
        super().__init__()
        self.masking = layers.Masking(0.0)
        self.recurrent, self.head = layers.GRU(4, return_sequences=True), layers.Dense(CLASSES)
        self.activations = {name: layers.Activation(name) for name in ("linear", "softmax", "sigmoid", "softplus")}
        self.losses_of_it = [(loss, activation) for loss, _, activation in every_loss()]

    def call(self, x):
        predictions = self.head(self.recurrent(self.masking(x)))
        return {name: layer(predictions) for name, layer in self.activations.items()}

    def terms(self, data):
        x, targets, weights = data
        predictions = self(x)
        assert hasattr(predictions["softmax"], "_keras_mask")
        found = {}
        for (loss, activation), target in zip(self.losses_of_it, targets, strict=True):
            found[loss.name] = loss(target, predictions[activation], weights)
        return found

    def train_step(self, data):
        with tf.GradientTape() as tape:
            terms = self.terms(data)
            loss = sum(terms.values())
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"total": loss, **terms}

    def test_step(self, data):
        return self.terms(data)


def in_one_step(run_eagerly):
    def program(strategy):
        rng = np.random.default_rng(3)
        x = rng.normal(size=(ROWS, STEPS, 3)).astype("float32")
        x[np.arange(STEPS) >= rng.integers(1, STEPS + 1, size=(ROWS, 1))] = 0.0
        weights = rng.uniform(0.2, 2.0, size=(ROWS, STEPS)).astype("float32")
        targets = tuple(target for _, target, _ in every_loss())
        with strategy.scope():
            model = AllLosses()
            model.compile(keras.optimizers.SGD(0.002), run_eagerly=run_eagerly)
        logs = BatchLogs()
        data = tf.data.Dataset.from_tensor_slices((x, targets, weights)).batch(BATCH)
        history = model.fit(data, epochs=2, verbose=0, callbacks=[logs]).history
        tested = model.evaluate(data, verbose=0, return_dict=True)
        return {"history": history, "logs": logs.train, "tested": tested, **state(model)}

    return program


IN_ONE_STEP = {"traced": in_one_step(False), "eager": in_one_step(True)}


@pytest.mark.parametrize("zero_stage", SHARDED)
@pytest.mark.parametrize("name", [exhaustive("traced"), exhaustive("eager")])
def test_masked_and_weighted_in_a_step_of_ones_own(name, zero_stage):
    assert_as_on_one_device(IN_ONE_STEP[name], zero_stage, rtol=1e-4)


def of_sequences(weighted):
    """CTC: labels of each length for predictions of each length, as in reading handwriting."""

    def data(rng):
        x, y = rng.normal(size=(ROWS, 8, 3)).astype("float32"), rng.integers(1, CLASSES, size=(ROWS, 3))
        y[np.arange(3) >= rng.integers(1, 4, size=(ROWS, 1))] = 0
        return (x, y, rng.uniform(0.2, 2.0, size=ROWS).astype("float32")) if weighted else (x, y)

    def compiled():
        return {"optimizer": keras.optimizers.SGD(0.01), "loss": losses.CTC()}

    def build():
        return keras.Sequential([keras.Input((8, 3)), layers.Dense(5, "tanh"), layers.Dense(CLASSES)])

    return Fitted("CTC, weighted" if weighted else "CTC", build, data, compiled)


SEQUENCES = [of_sequences(False), of_sequences(True)]


@pytest.mark.parametrize("zero_stage", SHARDED)
@pytest.mark.parametrize("program", [exhaustive(program) for program in SEQUENCES], ids=["not weighted", "weighted"])
def test_sequences(program, zero_stage):
    assert_as_on_one_device(program, zero_stage, rtol=1e-4)


def read_by_hand(strategy):
    """CTC by `keras.ops.ctc_loss`, of predictions and labels of each length, in a loop of one's own."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(8, 5, 3)).astype("float32"), rng.integers(1, CLASSES, size=(8, 2))
    lengths = np.array([5, 4, 5, 3] * 2), np.array([2, 1, 1, 2] * 2)
    with strategy.scope():
        model, optimizer = keras.Sequential([keras.Input((5, 3)), layers.Dense(CLASSES)]), keras.optimizers.SGD(0.1, momentum=0.9)

    def of_rank(x, y, steps, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(keras.ops.ctc_loss(y, model(x), labels, steps)) / 4
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    step = tf.function(lambda *batch: strategy.reduce("SUM", strategy.run(of_rank, args=batch), axis=None))
    data = tf.data.Dataset.from_tensor_slices((x, y, *lengths)).batch(4)
    found = [step(*batch).numpy() for batch in strategy.experimental_distribute_dataset(data)]
    return found, model.get_weights()


@pytest.mark.parametrize("zero_stage", SHARDED)
def test_sequences_in_a_loop_of_ones_own(zero_stage):
    assert_as_on_one_device(read_by_hand, zero_stage)


# Of the whole batch: warned of (test_losses_that_are_no_means.py), and one device's as test_over_global_batch.py gives them.
OVER_THE_BATCH = {"Dice", "Tversky", "Circle"}


def test_the_table_has_every_loss():
    kinds = {name for name, kind in vars(losses).items() if isinstance(kind, type) and issubclass(kind, losses.Loss)}
    assert kinds - {"Loss"} - OVER_THE_BATCH == {"CTC", *(kind for kind, *_ in KINDS)}
