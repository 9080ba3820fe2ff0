"""The private names of Keras that tfdist/keras_hooks/losses.py stands on: a failure names what an upgrade changed."""

import ast
import inspect
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from keras.src.losses import loss as keras_loss
from keras.src.losses import losses as keras_losses
from keras.src.trainers import compile_utils
from keras_owners import nn as keras_nn
from signatures import parameters

import tfdist  # noqa: F401  (installs the overrides)

OVERRIDDEN = {
    "reduce_weighted_values": ["values", "sample_weight", "mask", "reduction", "dtype"],
    "scale_loss_for_distribution": ["value"],
    "unscale_loss_for_distribution": ["value"],
}
USED = {
    "apply_mask": ["sample_weight", "mask", "dtype", "reduction"],
    "squeeze_or_expand_to_same_rank": ["x1", "x2", "expand_rank_1"],
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_functions_that_the_seam_overrides(name):
    original = getattr(keras_loss, name)._tfdist_original
    assert original.__module__ == "keras.src.losses.loss"
    assert not hasattr(original, "_tfdist_original"), "overridden twice"
    assert parameters(original) == OVERRIDDEN[name]


@pytest.mark.parametrize("name", USED)
def test_functions_that_the_seam_calls(name):
    assert parameters(getattr(keras_loss, name)) == USED[name]


def test_how_keras_wraps_a_function():
    """`tfdist.losses.OverGlobalBatch` makes of a function what `compile` makes of it."""
    assert parameters(keras_losses.LossFunctionWrapper)[:3] == ["fn", "reduction", "name"]
    assert "LossFunctionWrapper(loss_obj, name=loss_name)" in inspect.getsource(compile_utils.get_loss)
    one = keras.ops.softmax(np.ones((1, 2)))
    assert hasattr(keras.layers.Softmax()(one), "_keras_logits") or hasattr(keras.activations.softmax(one), "_keras_logits")


def test_the_backends_crossentropy():
    """What `keras.ops` calls as an attribute of the backend's module, with these names."""
    found = keras_nn.sparse_categorical_crossentropy
    original = getattr(found, "_tfdist_original", found)
    assert original.__module__ == keras_nn.__name__
    assert parameters(original) == ["target", "output", "from_logits", "axis"]
    assert "nn.sparse_categorical_crossentropy(" in inspect.getsource(keras.ops.sparse_categorical_crossentropy)
    source = inspect.getsource(keras_nn._get_logits)
    assert '"_keras_logits"' in source and "output.op.type == op_type" in source


def test_nobody_has_a_copy_of_an_overridden_function():
    """`from ...losses.loss import reduce_weighted_values` elsewhere in Keras would go past the override."""
    seen = 0
    for path in pathlib.Path(keras.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(name in text for name in OVERRIDDEN):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                assert not {alias.name for alias in node.names} & set(OVERRIDDEN), path
        seen += 1
    assert seen >= 3


def test_where_keras_calls_them(monkeypatch):
    """`Loss.__call__`, which scales; the loss tracker of `train_step` and `test_step`; the trackers of several outputs' losses;
    regularizers, which are scaled."""
    calls = []
    for name in OVERRIDDEN:
        function = getattr(keras_loss, name)
        monkeypatch.setattr(
            keras_loss, name, lambda *a, name=name, function=function, **k: calls.append(name) or function(*a, **k)
        )
    reduce, scale, unscale = OVERRIDDEN
    keras.losses.MeanSquaredError()(np.ones((2, 3)), np.zeros((2, 3)))
    loss = [reduce, scale]
    assert calls == loss
    x = keras.Input((2,))
    for outputs, regularizer, expected in (
        ([x], None, [*loss, unscale]),
        ([x, x], None, [*loss, unscale, *loss, unscale, unscale]),
        ([x], "l2", [*loss, scale, unscale]),
    ):
        model = keras.Model(x, [keras.layers.Dense(1, kernel_regularizer=regularizer)(output) for output in outputs])
        model.compile("sgd", ["mse"] * len(outputs))
        data = (tf.ones([4, 2]), [tf.ones([4, 1])] * len(outputs))
        for step in (model.train_step, model.test_step):
            calls.clear()
            step(data)
            assert calls == expected
    assert compile_utils.loss_module is trainer.loss_module is keras_loss


def test_the_loss_tracker_weighs_by_the_rows_of_the_replica():
    """A rank with no rows adds nothing to the numerator nor to the count."""
    source = inspect.getsource(trainer.TensorFlowTrainer.train_step)
    assert "sample_weight=tf.shape(" in source
    tracker = keras.metrics.Mean()
    tracker.update_state(tf.constant(3.0), sample_weight=tf.constant(0))
    assert float(tracker.count) == float(tracker.total) == 0.0


@pytest.mark.parametrize("reduction", ["mean", "sum_over_batch_size", "mean_with_sample_weight"])
def test_masks_are_weights_0_and_1_for_sums(reduction):
    """The seam takes the mask so, and divides by what is valid: the same as Keras on one device."""
    values, mask = np.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]), np.array([[1, 0, 1], [0, 0, 1]], bool)
    weights = np.array([[1.0, 1.0, 0.5], [1.0, 1.0, 0.25]])
    taken = keras_loss.apply_mask(weights, mask, dtype="float64", reduction="sum")
    np.testing.assert_array_equal(taken, weights * mask)
    divisor = mask.sum() if reduction != "mean_with_sample_weight" else (weights * mask).sum()
    value = keras_loss.reduce_weighted_values(values, weights, mask, reduction=reduction, dtype="float64")
    np.testing.assert_allclose(value, (values * weights * mask).sum() / divisor)


def test_scalars_are_not_scaled_by_keras(cpus):
    """Why the seam scales them: a loss function that ends in a mean would train N times as fast on N devices."""
    strategy = tf.distribute.MirroredStrategy(cpus[:2])

    @tf.function
    def step():
        return strategy.run(lambda: keras.losses.Dice()(tf.ones([4, 1]), tf.ones([4, 1]) / 3.0))

    expected = keras.losses.Dice()(tf.ones([4, 1]), tf.ones([4, 1]) / 3.0)
    for value in strategy.experimental_local_results(step()):
        np.testing.assert_allclose(value, expected)
