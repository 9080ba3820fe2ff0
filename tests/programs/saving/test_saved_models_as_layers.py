"""`keras.layers.TFSMLayer`: in the function of a SavedModel nobody knows the shapes of weights; each row is by itself there."""

import warnings

import keras
import numpy as np
import pytest
from grids import exhaustive
from training import strategy_for

from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device

pytestmark = pytest.mark.as_traced

RNG = np.random.default_rng(0)
X = RNG.normal(size=(13, 6)).astype("float32")
Y = RNG.normal(size=(13, 2)).astype("float32")


def seeded(seed):
    return keras.initializers.GlorotUniform(seed=seed)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("saved"))
    hidden = keras.layers.Dense(5, "tanh", kernel_initializer=seeded(1))
    keras.Sequential([keras.Input((6,)), hidden, keras.layers.LayerNormalization()]).export(folder, verbose=False)
    return folder


@pytest.mark.parametrize("zero_stage", (0, exhaustive(1), exhaustive(2), 3))
def test_it_is_one_device(saved, zero_stage):
    def program(strategy):
        with strategy.scope():
            inputs = keras.Input((6,))
            hidden = keras.layers.TFSMLayer(saved, call_endpoint="serve")(inputs)
            model = keras.Model(inputs, keras.layers.Dense(2, kernel_initializer=seeded(2))(hidden))
            model.compile(keras.optimizers.SGD(0.1), "mse")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "The layer")
            history = model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        return {**history, "predicted": model.predict(X, verbose=0), **state(model)}

    assert_as_on_one_device(program, zero_stage)


def test_made_outside_of_the_scope_it_is_refused(saved):
    """Its function reads its variables by their handles; the fix that the error names is what the test above does."""
    layer = keras.layers.TFSMLayer(saved, call_endpoint="serve")
    with strategy_for(2, 3).scope():
        inputs = keras.Input((6,))
        model = keras.Model(inputs, keras.layers.Dense(2)(layer(inputs)))
        with pytest.raises(ValueError, match=r"under no strategy.*Build the model, its layers and the optimizer .* inside one"):
            model.compile("sgd", "mse")
