"""Variables that were made outside `strategy.scope()`, moved under the strategy that needs them.

It is done `apart`: a step that is being traced finds the moved variable as one that was always there.

The mistake to avoid: moving what a traced function has read. The function goes on with the variable that it knows.
"""

from __future__ import annotations

from collections.abc import Iterable

import keras
import tensorflow as tf

from tfdist.sharding.apart import apart


def move(variables: Iterable[keras.Variable], strategy: tf.distribute.Strategy) -> None:
    """Makes `variables` anew under `strategy`, with the values that they have; those that are its own, or not made yet, stay.

    `_value` and `_initialize_with_initializer` are private to Keras: tests/layers/test_private_names_of_layers.py fails when they
    change.
    """
    others = [variable for variable in variables if variable._value is not None and made_by(variable) is not strategy]

    def make_anew() -> None:
        with strategy.scope():
            for variable in others:
                value = tf.constant(variable._value.numpy())
                variable._initialize_with_initializer(lambda *_, value=value, **__: value)

    if others:
        apart(make_anew)


def made_by(variable: keras.Variable) -> tf.distribute.Strategy | None:
    """Returns the strategy under which `variable` was made; None: none, or it is not made yet."""
    return getattr(variable._value, "distribute_strategy", None)
