"""The variables of an optimizer, counted by making them without values."""

import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors, temporary
from tfdist.optimizers.support import is_elementwise
from tfdist.tools.planning.weightless import weightless


@dataclasses.dataclass(frozen=True)
class Slot:
    """A variable of an optimizer.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        of: the place of the parameter in `model.trainable_variables` that it is state of; None: of none.
    """

    shape: tuple[int, ...]
    dtype: tf.DType
    of: int | None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size


def slots_of(model: keras.Model, made: keras.optimizers.Optimizer) -> tuple[Slot, ...]:
    """Builds an optimizer for a model, and returns its variables. Raises ValueError if it fails on the model."""
    inner = getattr(made, "inner_optimizer", made)
    references: dict[int, int] = {}
    places = {id(variable): place for place, variable in enumerate(model.trainable_variables)}
    original = inner.add_variable_from_reference

    def noted(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        variable = original(reference_variable, *args, **kwargs)
        if id(reference_variable) in places:
            references[id(variable)] = places[id(reference_variable)]
        return variable

    try:
        with weightless(), temporary.attributes(inner, add_variable_from_reference=noted):
            made.build(model.trainable_variables)
    except Exception as error:  # whatever an optimizer raises
        expected = f"`optimizer` cannot be built for the model: {type(error).__name__}: {error}"
        raise errors.value_error(expected, optimizer=type(made).__name__, model=model.name) from error
    return tuple(
        Slot(tuple(map(int, variable.shape)), tf.as_dtype(variable.dtype), references.get(id(variable)))
        for variable in made.variables
    )


def updates_each_alone(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer updates each weight when its gradient is there, whatever the others are."""
    of_all = ("inner_optimizer", "global_clipnorm", "clipnorm", "gradient_accumulation_steps")
    return is_elementwise(optimizer) and not any(getattr(optimizer, setting, None) for setting in of_all)


def new_optimizer(given: Any) -> keras.optimizers.Optimizer:
    """Returns an unbuilt optimizer like the given one."""
    if isinstance(given, keras.optimizers.Optimizer):
        return type(given).from_config(given.get_config())
    try:
        return keras.optimizers.get(given)
    except (ValueError, TypeError) as error:
        fix = 'Pass one of `keras.optimizers`, or its name, such as "adamw".'
        raise errors.value_error(f"`optimizer` is no optimizer of Keras: {error}", optimizer=given, fix=fix) from None
