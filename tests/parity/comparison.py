"""Comparing what two runs leave behind: structures of numbers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

RTOL = 1e-5


def assert_same_tree(actual: Any, expected: Any, what: str = "", rtol: float = RTOL) -> None:
    """Numbers agree to `rtol` of the largest of each array, and what is not finite to itself; everything else is equal."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected), f"{what}: {list(actual)} instead of {list(expected)}"
        for key in expected:
            assert_same_tree(actual[key], expected[key], f"{what}, {key}", rtol)
    elif isinstance(expected, list | tuple) and not all(isinstance(value, float | int) for value in expected):
        assert len(actual) == len(expected), what
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same_tree(one, other, f"{what} {number}", rtol)
    elif isinstance(expected, str) or expected is None:
        assert actual == expected, what
    else:
        actual, expected = np.asarray(actual), np.asarray(expected)
        assert actual.shape == expected.shape, what
        scale = max(np.abs(expected).max(initial=0.0, where=np.isfinite(expected)), 1e-2)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * scale, err_msg=what)


def state(model: keras.Model) -> dict[str, list[np.ndarray]]:
    """Returns a model's weights and its optimizer's slots."""
    slots = model.optimizer.variables if model.optimizer is not None else []
    return {"weights": model.get_weights(), "slots": [variable.numpy() for variable in slots]}


def losses_of_fit(model: keras.Model, *data: Any, **arguments: Any) -> tuple[list[float], dict[str, list[float]]]:
    """Fits `model` and returns the loss that Keras logs after each step, and the history."""
    losses: list[float] = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"])))
    history = model.fit(*data, verbose=0, callbacks=[record], **arguments).history
    return losses, {key: [float(value) for value in history[key]] for key in sorted(history)}


class BatchLogs(keras.callbacks.Callback):
    """Keeps what Keras logs for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.train: list[dict[str, float]] = []
        self.test: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self.train.append({name: float(np.mean(value)) for name, value in logs.items()})

    def on_test_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        self.test.append({name: float(np.mean(value)) for name, value in logs.items()})
