"""What small programs train: a few rows of data, nets and optimizers, and what a `fit` leaves behind."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

from tests.parity.comparison import state

ROWS, BATCH = 22, 8  # the last batch has 6 rows


def normal(*shape: int, seed: int = 11) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, *shape)).astype("float32")


def integers(high: int, *shape: int, low: int = 0, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, (ROWS, *shape)).astype("int32")


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def mlp(*units: int, inputs: int = 4, activation: str = "tanh", **arguments: Any) -> keras.Model:
    hidden = [layers.Dense(number, activation) for number in units[:-1]]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(units[-1])], **arguments)


def fitted(model: keras.Model, *data: Any, **arguments: Any) -> dict[str, Any]:
    """Fits the model in batches, of which the last is smaller; returns its history and `state`."""
    arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": 2} | arguments
    return {"history": model.fit(*data, **arguments).history, **state(model)}
