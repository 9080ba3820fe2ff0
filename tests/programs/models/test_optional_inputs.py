"""Inputs that a model may do without: `keras.Input(..., optional=True)`, and layers that bear None."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers
from training import strategy_for

from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(200)]

RNG = np.random.default_rng(4)
X = RNG.normal(size=(20, 6)).astype("float32")
Y = RNG.normal(size=(20, 2)).astype("float32")
UNEVEN = {"batch_size": 8, "verbose": 0, "shuffle": False}  # 8, 8 and 4 rows


class OrNothing(layers.Layer):
    """Adds a projection of its second input, where there is one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(5), layers.Dense(5)

    def build(self, x_shape, y_shape=None):
        self.first.build(x_shape)
        self.second.build((None, 3))

    def call(self, x, y=None):
        return self.first(x) if y is None else self.first(x) + self.second(y)

    def compute_output_shape(self, x_shape, y_shape=None):
        return (*x_shape[:-1], 5)


def model_in(strategy, as_dictionary=True):
    with strategy.scope():
        inputs = {"x": keras.Input((6,), name="x"), "y": keras.Input((3,), name="y", optional=True)}
        outputs = layers.Dense(2)(OrNothing()(inputs["x"], inputs["y"]))
        model = keras.Model(inputs if as_dictionary else list(inputs.values()), outputs)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    return model


def from_arrays(strategy):
    model = model_in(strategy)
    x = {"x": X, "y": None}
    history = model.fit(x, Y, epochs=2, validation_data=(x, Y), **UNEVEN).history
    found = {"history": history, "predicted": model.predict(x, batch_size=8, verbose=0), **state(model)}
    found["evaluated"] = model.evaluate(x, Y, batch_size=8, verbose=0, return_dict=True)
    found["one batch"] = model.train_on_batch({"x": X[:6], "y": None}, Y[:6], return_dict=True)
    found["predicted batch"] = model.predict_on_batch({"x": X[:6], "y": None})
    return found


def from_a_list(strategy):
    model = model_in(strategy, as_dictionary=False)
    return {"history": model.fit([X, None], Y, epochs=2, **UNEVEN).history, **state(model)}


def batches():
    for start in range(0, 20, 8):
        yield {"x": X[start : start + 8], "y": None}, Y[start : start + 8]


def from_a_generator(strategy):
    """Without the slots: on one device Keras counts one step too many when such data run out."""
    model = model_in(strategy)
    history = model.fit(batches(), verbose=0).history
    evaluated = model.evaluate(batches(), verbose=0, return_dict=True)
    return {"history": history, "evaluated": evaluated, "predicted": model.predict(batches(), verbose=0)}


PROGRAMS = [from_arrays, from_a_list, from_a_generator]


def cases():
    for program in PROGRAMS:
        for stage in range(4):
            is_by_default = stage == 3 and program is not from_a_list
            yield (program, stage) if is_by_default else exhaustive(program, stage)


@pytest.mark.parametrize(("program", "zero_stage"), list(cases()))
def test_as_on_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)


def test_an_optional_that_may_hold_rows_is_refused():
    dataset = tf.data.Dataset.from_tensors((X, tf.experimental.Optional.from_value(X)))
    with pytest.raises(NotImplementedError, match="has no rows to split"):
        strategy_for(2, 0).experimental_distribute_dataset(dataset)
