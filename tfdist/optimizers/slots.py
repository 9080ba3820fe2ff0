"""Which of an optimizer's variables belong to one parameter."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.optimizers.variables import variable_of

# Keras's own lists, which hold no slots of the update.
_OTHER_LISTS = frozenset(
    {"_variables", "_trainable_variables", "_accumulated_gradients", "_model_variables_moving_average"}
)


def slots_of(optimizer: Any, parameter: Any) -> list[tf.Variable]:
    """Returns the slots of `parameter`: its entry in each of the optimizer's lists that have one entry per parameter."""
    index = optimizer._get_variable_index(parameter)
    count = len(optimizer._trainable_variables)
    slots = []
    for name, values in sorted(vars(optimizer).items()):
        if name in _OTHER_LISTS or not isinstance(values, list) or len(values) != count:
            continue
        slot = values[index]
        if isinstance(getattr(slot, "value", None), tf.Variable) or isinstance(slot, tf.Variable):
            slots.append(variable_of(slot))
    return slots
