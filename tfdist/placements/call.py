"""What a rule sees of an operation: its type, its attributes, what is known of its inputs; no graph, no rank."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfdist.graphs.constants import value_of
from tfdist.placements.kinds import Placement, Unknown, Why


@dataclasses.dataclass(frozen=True)
class Call:
    """One operation and the placements of what it is given.

    Attributes:
        type: the type of the operation.
        name: its name.
        inputs: the placements of its inputs, none of which is `Unknown`.
        shapes: the static shapes of its inputs, those of a rank.
        dtypes: their dtypes.
        results: the static shapes of its outputs.
    """

    type: str
    name: str
    inputs: tuple[Placement, ...]
    shapes: tuple[tf.TensorShape, ...]
    dtypes: tuple[tf.DType, ...]
    results: tuple[tf.TensorShape, ...]
    _attribute: Callable[[str], Any]
    _value: Callable[[int], np.ndarray | None]

    def attribute(self, name: str) -> Any:
        """Returns the attribute `name` of the operation. Raises ValueError if it has none."""
        return self._attribute(name)

    def value(self, place: int) -> np.ndarray | None:
        """Returns the value of the input number `place`, where it is known when the operation is made; else None."""
        return self._value(place)

    def unknown(self, why: Why) -> Unknown:
        """Returns the placement of what this operation makes unknown."""
        return Unknown(why, f"{self.type} {self.name!r}")


Rule: TypeAlias = Callable[[Call], Placement | list[Placement]]
"""Returns the placement of each output, or one that is that of all."""


def call_of(op: tf.Operation, inputs: tuple[Placement, ...]) -> Call:
    """Returns the `Call` of a traced operation."""
    return Call(
        op.type,
        op.name,
        inputs,
        tuple(x.shape for x in op.inputs),
        tuple(x.dtype for x in op.inputs),
        tuple(x.shape for x in op.outputs),
        functools.partial(_attribute_of, op),
        functools.partial(_value_of, op),
    )


def _attribute_of(op: tf.Operation, name: str) -> Any:
    return op.get_attr(name)


def _value_of(op: tf.Operation, place: int) -> np.ndarray | None:
    return value_of(op.inputs[place])
