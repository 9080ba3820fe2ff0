"""Training in several phases: pseudo-labels, and cross-validation with clones of a model."""

import keras
import numpy as np
import pytest
from grids import exhaustive
from keras import layers

from tests.programs.comparing import assert_as_on_one_device
from tests.programs.small_training import BATCH, ROWS, adam, fitted, integers, mlp, normal, sgd

pytestmark = pytest.mark.as_traced


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


PROGRAMS = (pseudo_labels, cross_validation)


@pytest.mark.parametrize(
    ("program", "zero_stage", "devices"),
    [exhaustive(program, stage, devices) for program in PROGRAMS for stage, devices in ((0, 4), (3, 2))],
)
def test_it_is_one_device(program, zero_stage, devices):
    assert_as_on_one_device(program, zero_stage, devices)
