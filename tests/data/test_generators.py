"""Python generators in `fit`: Keras reads them ahead, and would make an iterator of them anew for each validation."""

import time

import keras
import numpy as np
import pytest

import tfdist
from tfdist.data.epoch_iterator import Tape

pytestmark = pytest.mark.timeout(120)


class Mean(keras.layers.Layer):
    def call(self, x):
        return keras.ops.mean(x, axis=-1, keepdims=True)


def numbered(sizes):
    """Yields batches of 4 rows, each of which has its number in every element; of the sizes in turn."""
    number = 0
    while True:
        yield np.full((4, sizes[number % len(sizes)]), number, "float32"), np.zeros((4, 1), "float32")
        number += 1


def model_of(strategy, size=3, **arguments):
    """A model whose loss is the mean of the batches' numbers."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((size,)), Mean()])
        model.compile("sgd", "mae", **arguments)
    return model


@pytest.mark.parametrize("sizes", [(3,), (3, 5)], ids=["one size", "two sizes"])
def test_every_batch_is_read_once(sizes, cpus):
    """Each validation had the first two batches again, and what was read ahead was lost: on each worker another number."""
    model = model_of(tfdist.ShardedStrategy(cpus[:2]), None if len(sizes) > 1 else sizes[0])
    wait = keras.callbacks.LambdaCallback(on_test_end=lambda logs: time.sleep(0.1))  # something is read ahead
    history = model.fit(
        numbered(sizes),
        steps_per_epoch=2,
        validation_data=numbered(sizes),
        validation_steps=3,
        epochs=3,
        verbose=0,
        callbacks=[wait],
    ).history
    np.testing.assert_allclose(history["loss"], [0.5, 2.5, 4.5], rtol=1e-6)
    np.testing.assert_allclose(history["val_loss"], [1, 4, 7], rtol=1e-6)


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_one_generator_for_several_calls(steps_per_execution, cpus):
    """What one call had read ahead was lost to the next: on each worker another number of batches."""
    model = model_of(tfdist.ShardedStrategy(cpus[:2]), steps_per_execution=steps_per_execution)
    batches = numbered((3,))
    losses = []
    for _ in range(3):
        losses += model.fit(batches, steps_per_epoch=3, verbose=0).history["loss"]
        time.sleep(0.1)  # something is read ahead
    losses.append(model.evaluate(batches, steps=3, verbose=0))
    np.testing.assert_allclose(losses, [1, 4, 7, 10], rtol=1e-6)
    assert model.predict(batches, steps=3, verbose=0)[::4, 0].tolist() == [12, 13, 14]
    assert next(batches)[0][0, 0] > 14, "it is open still"


def test_what_is_given_back():
    source = (number for number in range(9))
    tape = Tape.of(source)
    reading = tape.batches(source)
    assert [next(reading) for _ in range(4)] == [0, 1, 2, 3]
    tape.use(3)
    later = Tape.of(source)
    reading = later.batches(source)
    assert next(reading) == 3
    later.use(3)  # before they are read
    assert [next(reading) for _ in range(3)] == [4, 5, 6]
    del reading
    assert list(Tape.of(source).batches(source)) == [6, 7, 8]
