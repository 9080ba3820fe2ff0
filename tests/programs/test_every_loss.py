"""Losses of Keras with a value for each row, on an uneven last batch, weighted and not: trained and logged as on one device."""

import keras
import numpy as np
import pytest
from grids import exhaustive
from keras import layers, losses

from tests.programs.comparing import assert_as_on_one_device
from tests.programs.fitting import ROWS, Fitted

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


# Losses of a whole batch, which are warned of (test_losses_that_are_no_means.py); rows compared with each other; and sequences.
ELSEWHERE = {"Dice", "Tversky", "Circle", "CTC"}


def test_the_table_has_every_loss():
    kinds = {name for name, kind in vars(losses).items() if isinstance(kind, type) and issubclass(kind, losses.Loss)}
    assert kinds - {"Loss"} - ELSEWHERE == {kind for kind, *_ in KINDS}
