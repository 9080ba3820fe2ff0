"""Python generators in `fit`: Keras reads them ahead, and would make an iterator of them anew for each validation."""

import time

import keras
import numpy as np
import pytest

import tfdist

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


@pytest.mark.parametrize("sizes", [(3,), (3, 5)], ids=["one size", "two sizes"])
def test_every_batch_is_read_once(sizes, cpus):
    """Each validation had the first two batches again, and what was read ahead was lost: on each worker another number."""
    strategy = tfdist.ShardedStrategy(cpus[:2])
    with strategy.scope():
        model = keras.Sequential([keras.Input((None if len(sizes) > 1 else sizes[0],)), Mean()])
        model.compile("sgd", "mae")
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
