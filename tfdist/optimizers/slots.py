"""Which of an optimizer's variables belong to one parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.optimizers.variables import variable_of

# Keras's own lists, which hold no slots of the update.
_OTHER_LISTS = frozenset({"_variables", "_trainable_variables", "_accumulated_gradients", "_model_variables_moving_average"})


def slots_of(optimizer: Any, parameter: Any) -> list[tf.Variable]:
    """Returns the slots of `parameter`: its entry in each of the optimizer's lists that have one entry per parameter."""
    return [variable_of(slot) for slot in _entries_of(optimizer, parameter)]


@contextlib.contextmanager
def slots_replaced(optimizer: Any, parameter: Any, stand_ins: Sequence[Any]) -> Iterator[None]:
    """Within it, Keras's slots of `parameter` read and write `stand_ins`, in the order of `slots_of`."""
    slots = _entries_of(optimizer, parameter)
    values = [slot._value for slot in slots]
    try:
        for slot, stand_in in zip(slots, stand_ins, strict=True):
            slot._value = stand_in
        yield
    finally:
        for slot, value in zip(slots, values, strict=True):
            slot._value = value


def _entries_of(optimizer: Any, parameter: Any) -> list[Any]:
    index = optimizer._get_variable_index(parameter)
    count = len(optimizer._trainable_variables)
    slots = []
    for name, values in sorted(vars(optimizer).items()):
        if name in _OTHER_LISTS or not isinstance(values, list) or len(values) != count:
            continue
        slot = values[index]
        if isinstance(getattr(slot, "value", None), tf.Variable) or isinstance(slot, tf.Variable):
            slots.append(slot)
    return slots
