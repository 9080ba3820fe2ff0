"""Which losses slices of a batch add up to, found in a trace of them."""

import keras
import pytest
import tensorflow as tf

from tests.programs.rows.functions_of_the_batch import FUNCTIONS
from tests.programs.rows.ways_of_training import NO_LAYER, applies
from tfdist.losses.sliced_batch import is_mean_over_rows

pytestmark = pytest.mark.usefixtures("float64")

ROWS = {name: tf.TensorSpec([None, width], tf.float64) for name, width in (("x", 5), ("y", 3), ("p", 3))}
LOSSES = [f for f in FUNCTIONS.values() if f.kind == "loss" and applies(f, NO_LAYER[-1], "uneven")]


@pytest.mark.parametrize("group", sorted({function.group for function in LOSSES}))
def test_functions_of_the_batch(group):
    """All means are seen to be such, and nothing else is taken for one."""

    def reduced(function, rows):
        value = function(**rows, model=None, layer=None)
        return tf.reduce_mean(value) if value.shape.rank else value

    of_group = [function for function in LOSSES if function.group == group]
    found = {f.name: is_mean_over_rows(lambda rows, f=f: reduced(f, rows), ROWS, None) for f in of_group}
    assert found == dict.fromkeys(found, group == "means")


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean", "mean_with_sample_weight"])
@pytest.mark.parametrize("name", ["MeanSquaredError", "CategoricalCrossentropy", "SparseCategoricalCrossentropy"])
def test_losses_of_keras(name, reduction):
    """Also those that leave some rows out, and weigh them."""
    loss = getattr(keras.losses, name)(reduction=reduction, **({"ignore_class": 1} if name.startswith("Sparse") else {}))
    targets = tf.TensorSpec([None], tf.int32) if name.startswith("Sparse") else ROWS["y"]
    rows = targets, ROWS["p"], tf.TensorSpec([None], tf.float64)
    assert is_mean_over_rows(lambda given: loss(*given), rows, None)


@pytest.mark.parametrize("loss", [keras.losses.Dice(), keras.losses.Tversky(), keras.losses.Circle()])
def test_losses_of_keras_that_are_none(loss):
    targets = tf.TensorSpec([None], tf.int32) if "circle" in loss.name else ROWS["y"]
    assert not is_mean_over_rows(lambda given: loss(*given), (targets, ROWS["p"]), None)


def test_what_cannot_be_traced_is_none():
    assert not is_mean_over_rows(lambda rows: tf.reduce_mean(rows["p"]) if rows["p"].shape[0] else 1 / 0, ROWS, None)
