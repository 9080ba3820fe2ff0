"""Tensor-parallel layers in a plain model, in processes that have made no strategy."""

import os

import keras
import numpy as np
import pytest

import tfdist
from tests import forks

pytestmark = pytest.mark.timeout(300)


def save_a_plain_model():
    keras.utils.set_random_seed(1)
    own = keras.Sequential([keras.Input((3,)), tfdist.layers.ColumnParallelDense(4), tfdist.layers.RowParallelDense(1)])
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    own.save("own.keras")
    plain.load_weights("own.keras")
    own.compile("sgd", "mse")
    plain.compile("sgd", "mse")
    x, y = np.ones((6, 3), "float32"), np.ones((6, 1), "float32")
    assert np.isclose(own.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0))


def load_it():
    loaded = keras.models.load_model("own.keras")
    assert type(loaded.layers[0]) is tfdist.layers.ColumnParallelDense
    assert any(weight.numpy().any() for weight in loaded.weights)


def test_parallel_layers_in_a_plain_model(tmp_path):
    """In processes that have imported tfdist, and no more."""
    for function in (save_a_plain_model, load_it):
        process = forks.start(function, environment=dict(os.environ), folder=tmp_path, output=tmp_path / "output.txt")
        try:
            assert process.wait(100) == 0, (tmp_path / "output.txt").read_text()
        finally:
            process.kill()
