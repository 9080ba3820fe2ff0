"""What Keras's callbacks know in Python, and a run that goes on must know, too.

A callback that decides by the epochs before has them in attributes: `EarlyStopping` how long it has waited for something better
than what, `ReduceLROnPlateau` the same, `ModelCheckpoint` what the best was. A callback that the user has written keeps what it
must not forget in a variable of the model, or counts from `model.optimizer.iterations`: its attributes stay as they are.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

_KEPT: dict[type, str] = {
    keras.callbacks.EarlyStopping: "wait best best_epoch stopped_epoch best_weights",
    keras.callbacks.ReduceLROnPlateau: "wait best cooldown_counter",
    keras.callbacks.ModelCheckpoint: "best _batches_seen_since_last_saving _last_batch_seen",
    keras.callbacks.SwapEMAWeights: "_ema_weights_in_model",
    keras.callbacks.TensorBoard: "_global_train_batch _global_test_batch",
}


def callback_states(callbacks: Sequence[Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns what the callbacks know, by names that are the same in every run: numbers, and arrays of weights."""
    numbers: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, callback, attribute in _attributes(callbacks):
        value = getattr(callback, attribute, None)
        if isinstance(value, list):
            arrays |= {f"{name}/{index}": np.asarray(each) for index, each in enumerate(value)}
        elif value is None or isinstance(value, bool | int | float):
            numbers[name] = value
        else:
            numbers[name] = float(value)
    return numbers, arrays


def restore_callback_states(callbacks: Sequence[Any], numbers: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Puts back what `callback_states` has returned; of a callback that was not there it changes nothing."""
    for name, callback, attribute in _attributes(callbacks):
        if name in numbers:
            setattr(callback, attribute, numbers[name])
        number = sum(key.rpartition("/")[0] == name for key in arrays)
        if number:
            setattr(callback, attribute, [arrays[f"{name}/{index}"] for index in range(number)])


def _attributes(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any, str]]:
    """Yields (name, callback, attribute) of all that is kept; the n-th callback of a kind is that of every run."""
    for kind, attributes in _KEPT.items():
        for number, callback in enumerate(callback for callback in callbacks if isinstance(callback, kind)):
            for attribute in attributes.split():
                yield f"{kind.__name__}_{number}/{attribute}", callback, attribute
