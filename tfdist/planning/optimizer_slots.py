"""The variables of an optimizer, counted by making them without values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.optimizers.support import is_elementwise
from tfdist.planning.weightless import weightless

_FIX = 'Pass one of `keras.optimizers`, or its name, such as "adamw".'


@dataclasses.dataclass(frozen=True)
class Slot:
    """A variable of an optimizer.

    Attributes:
        shape: its shape.
        dtype: the name of its dtype.
        of: the place of the parameter in `model.trainable_variables` that it is state of; None: of none.
    """

    shape: tuple[int, ...]
    dtype: str
    of: int | None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * tf.as_dtype(self.dtype).size


def slots_of(model: keras.Model, optimizer: Any) -> tuple[str, tuple[Slot, ...], bool]:
    """Returns the name of an optimizer, its variables for a model, and whether it may run on shards.

    Args:
        model: the model.
        optimizer: a Keras optimizer, which is left as it is, or its name; None: that of the compiled model, or "adam".

    Raises:
        ValueError: it is no Keras optimizer, or fails on the model.
    """
    made = new_optimizer(optimizer if optimizer is not None else getattr(model, "optimizer", None) or "adam")
    inner = getattr(made, "inner_optimizer", made)
    references: dict[int, int] = {}
    places = {id(variable): place for place, variable in enumerate(model.trainable_variables)}
    original = inner.add_variable_from_reference

    def noted(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        variable = original(reference_variable, *args, **kwargs)
        if id(reference_variable) in places:
            references[id(variable)] = places[id(reference_variable)]
        return variable

    inner.add_variable_from_reference = noted
    try:
        with weightless():
            made.build(model.trainable_variables)
    except Exception as error:  # whatever an optimizer raises
        expected = f"`optimizer` cannot be built for the model: {type(error).__name__}: {error}"
        raise errors.value_error(expected, optimizer=type(made).__name__, model=model.name) from error
    finally:
        del inner.add_variable_from_reference
    slots = [
        Slot(_shape(variable), tf.as_dtype(variable.dtype).name, references.get(id(variable))) for variable in made.variables
    ]
    return type(inner).__name__, tuple(slots), is_elementwise(inner)


def updates_each_alone(optimizer: Any) -> bool:
    """Whether an optimizer, or that of a name, updates each weight when its gradient is there, whatever the others are."""
    made = new_optimizer(optimizer)
    of_all = ("inner_optimizer", "global_clipnorm", "clipnorm", "gradient_accumulation_steps")
    return is_elementwise(made) and not any(getattr(made, setting, None) for setting in of_all)


def new_optimizer(given: Any) -> keras.optimizers.Optimizer:
    """Returns an unbuilt optimizer like the given one."""
    if isinstance(given, keras.optimizers.Optimizer):
        return type(given).from_config(given.get_config())
    try:
        return keras.optimizers.get(given)
    except (ValueError, TypeError) as error:
        raise errors.value_error(f"`optimizer` is no optimizer of Keras: {error}", optimizer=given, fix=_FIX) from None


def _shape(variable: keras.Variable) -> tuple[int, ...]:
    return tuple(int(size) for size in variable.shape)
