"""How a rank updates a metric: which are known to add up, and what numbers of a rank count."""

import keras
import pytest
import tensorflow as tf

from tfdist.metrics.updates import add_up_over_slices, is_container, parts

ROWS = tf.ones([5, 3])


class Largest(keras.metrics.Mean):
    """A subclass, which updates in its own way."""

    def update_state(self, values, sample_weight=None):
        self.total.assign(keras.ops.maximum(self.total, keras.ops.max(values)))


def fn(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


KNOWN = {
    "Keras's": (True, keras.metrics.AUC),
    "a function of Keras's": (True, keras.metrics.MeanSquaredError),
    "a custom function": (False, lambda: keras.metrics.MeanMetricWrapper(fn)),
    "a loss": (False, lambda: keras.metrics.MeanMetricWrapper(keras.losses.MeanSquaredError())),
    "a custom update": (False, Largest),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_to_add_up(name):
    expected, make = KNOWN[name]
    assert add_up_over_slices([make()], [ROWS]) is expected


def test_all_must_add_up_for_all_predictions():
    keras_own, custom = keras.metrics.MeanSquaredError(), Largest()
    assert not add_up_over_slices([keras_own, custom], [ROWS])
    assert not add_up_over_slices([keras_own], [ROWS, ROWS[0]]), "of one vector it is one number"
    assert add_up_over_slices([], [ROWS]) and add_up_over_slices([keras_own], [ROWS, ROWS])


def test_metrics_within_a_compiled_model():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3)])
    mse, own = keras.metrics.MeanSquaredError(), Largest()
    model.compile("sgd", "mse", metrics=[mse])
    model.evaluate(ROWS, ROWS, verbose=0)
    (compiled,) = [metric for metric in model.metrics if is_container(type(metric))]
    assert parts(compiled) == [mse] and parts(own) == [own] and not is_container(Largest)
