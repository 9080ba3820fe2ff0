"""What Keras calls of a model before its first step, to learn what its outputs are like."""

import keras
import numpy as np
import pytest
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from training import strategy_for


class Noted(keras.layers.Layer):
    """Notes how often it is called on symbols."""

    symbolic_calls = 0

    def call(self, x):
        self.symbolic_calls += in_symbolic_scope()
        return 2 * x


def functional(noted):
    x = keras.Input((3,))
    return keras.Model(x, {"a": keras.layers.Dense(2)(noted(x))})


def sequential(noted):
    return keras.Sequential([keras.Input((3,)), noted, keras.layers.Dense(2)])


@pytest.mark.parametrize(("build", "wrap"), [(functional, lambda x: {"a": x}), (sequential, lambda x: x)])
def test_a_built_model_is_not_called(build, wrap):
    with strategy_for(2, 3).scope():
        noted = Noted()
        model = build(noted)
        model.compile("sgd", wrap("mse"), metrics=wrap(["mae"]))
    before = noted.symbolic_calls
    history = model.fit(np.ones((6, 3)), wrap(np.ones((6, 2))), batch_size=4, verbose=0).history
    assert noted.symbolic_calls == before and "call" not in vars(model)
    assert {"loss", "a_mae"} <= history.keys() or {"loss", "mae"} <= history.keys()
