"""Recurrent layers that remember the last batch: each rank the rows that it has."""

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
X = RNG.normal(size=(12, 6, 3)).astype("float32")
Y = X[:, 0, :2]
BATCHES = {"batch_size": 4, "verbose": 0, "shuffle": False}


def trained(model):
    """Remembers through an epoch, forgets before the next, remembers from `evaluate` to `predict`."""
    found = []
    for _ in range(2):
        found.append(model.fit(X, Y, **BATCHES).history)
        for layer in model.layers:
            if hasattr(layer, "reset_state"):
                layer.reset_state()
    found.append(model.evaluate(X, Y, batch_size=4, verbose=0))
    return {"found": found, "predicted": model.predict(X, batch_size=4, verbose=0), **state(model)}


def compiled(layers_of_it):
    model = keras.Sequential(layers_of_it)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def with_the_global_batch_size(strategy):
    with strategy.scope():
        model = compiled([keras.Input(batch_shape=(4, 6, 3)), layers.GRU(4, stateful=True), layers.Dense(2)])
    return trained(model)


def with_that_of_the_data(strategy):
    with strategy.scope():
        model = compiled([layers.SimpleRNN(5, stateful=True), layers.Dense(2)])
    return trained(model)


def in_both_directions(strategy):
    with strategy.scope():
        both = layers.Bidirectional(layers.LSTM(3, stateful=True, return_sequences=True))
        model = compiled([keras.Input(batch_shape=(4, 6, 3)), both, layers.GRU(4, stateful=True), layers.Dense(2)])
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4, drop_remainder=True)
    found = [model.fit(dataset, epochs=2, verbose=0).history]
    both.reset_state()
    return {"found": found, "predicted": model.predict(dataset, verbose=0), **state(model)}


PROGRAMS = [with_the_global_batch_size, with_that_of_the_data, in_both_directions]


def cases():
    for place, program in enumerate(PROGRAMS):
        for stage in range(4):
            yield (program, stage) if place < 2 and stage == (3, 0)[place] else exhaustive(program, stage)


@pytest.mark.filterwarnings("error:The layer .* contains rows that meet:UserWarning")  # a false alarm
@pytest.mark.parametrize(("program", "zero_stage"), list(cases()))
def test_as_on_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)


def remembering(strategy):
    with strategy.scope():
        return compiled([keras.Input(batch_shape=(4, 6, 3)), layers.LSTM(5, stateful=True), layers.Dense(2)])


def test_other_batches_are_refused():
    strategy = strategy_for(2, 0)
    with pytest.raises(ValueError, match="one device's rows.*rows_of_states=4, rows=3.*drop_remainder"):
        remembering(strategy).fit(X, Y, batch_size=6, verbose=0)
    model = remembering(strategy)
    model.fit(X, Y, **BATCHES)
    with pytest.raises(ValueError, match="one device's rows.*rows_of_states=2, rows=4"):
        model(X[:4])
    # Of rows that the step alone knows: TensorFlow may come to another mismatch first.
    with pytest.raises(tf.errors.InvalidArgumentError, match="one device's rows|Incompatible shapes"):
        model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(5), verbose=0)
