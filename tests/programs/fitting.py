"""The most usual program: a model is compiled, fitted, evaluated and asked for predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.parity.comparison import state

ROWS, BATCH = 22, 8  # the last batch has 6 rows: 3 on each of two devices; of four the last two have one each


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """A program that fits a model with `compile` and `fit`; call it with a strategy.

    Attributes:
        name: what it is called in a table of programs.
        build: makes the model, in `scope()`.
        data: returns the arguments of `fit`, from a random generator: (x, y) or (x, y, sample_weight).
        compiled: returns the arguments of `compile`, in `scope()`.
        epochs: of `fit`.
        predicts: whether what the model predicts is compared, too.
    """

    name: str
    build: Callable[[], keras.Model]
    data: Callable[[np.random.Generator], tuple[Any, ...]]
    compiled: Callable[[], dict[str, Any]]
    epochs: int = 2
    predicts: bool = True

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, strategy: tf.distribute.Strategy) -> dict[str, Any]:
        x, *rest = self.data(np.random.default_rng(5))
        with strategy.scope():
            model = self.build()
            model.compile(**self.compiled())
        given = dict(zip(("y", "sample_weight"), rest, strict=False))
        history = model.fit(x, **given, batch_size=BATCH, epochs=self.epochs, shuffle=False, verbose=0).history
        evaluated = model.evaluate(x, **given, batch_size=BATCH, verbose=0, return_dict=True)
        predicted = model.predict(x, batch_size=BATCH, verbose=0) if self.predicts else None
        return {"history": history, "evaluated": evaluated, "predicted": predicted, **state(model)}


def regression(rng: np.random.Generator, *shape: int, targets: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs of `shape` and `targets` numbers to predict, for each row."""
    return rng.normal(size=(ROWS, *shape)).astype("float32"), rng.normal(size=(ROWS, targets)).astype("float32")


def tokens(rng: np.random.Generator, length: int = 5, vocabulary: int = 11, targets: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of token ids, 0 for padding at their end, and `targets` numbers to predict."""
    ids = rng.integers(1, vocabulary, size=(ROWS, length))
    lengths = rng.integers(1, length + 1, size=(ROWS, 1))
    return np.where(np.arange(length) < lengths, ids, 0), rng.normal(size=(ROWS, targets)).astype("float32")


def momentum() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "loss": "mse", "metrics": ["mae"]}


def adam() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.Adam(0.01, epsilon=1e-3), "loss": "mse"}


def with_head(*layers: Any, shape: tuple[int | None, ...], dtype: str = "float32", units: int = 3) -> keras.Model:
    """Returns a Sequential of `layers` whose outputs a Dense layer turns into `units` numbers."""
    head = [keras.layers.Flatten(), keras.layers.Dense(units, name="head")]
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers, *head])
