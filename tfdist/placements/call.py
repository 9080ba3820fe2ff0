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

_MOST_ALIKE = 64  # operations that are looked back through
_REPEATING = ("BroadcastTo", "Tile")
_EACH_ALONE = frozenset(
    "Add AddV2 BiasAdd Cast Identity LogicalAnd LogicalNot LogicalOr Mul Neg SelectV2 Sigmoid Sub Tanh".split()
)


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
        is_pure: whether it is no more than a function of its inputs: no state, no resource, and no function in it.
    """

    type: str
    name: str
    inputs: tuple[Placement, ...]
    shapes: tuple[tf.TensorShape, ...]
    dtypes: tuple[tf.DType, ...]
    results: tuple[tf.TensorShape, ...]
    _attribute: Callable[[str], Any]
    _value: Callable[[int], np.ndarray | None]
    _elements: Callable[[int], list[int | None] | None]
    _is_alike: Callable[[int, int], bool]
    is_pure: bool = True

    def attribute(self, name: str) -> Any:
        """Returns the attribute `name` of the operation. Raises ValueError if it has none."""
        return self._attribute(name)

    def value(self, place: int) -> np.ndarray | None:
        """Returns the value of the input number `place`, where it is known when the operation is made; else None."""
        return self._value(place)

    def elements(self, place: int) -> list[int | None] | None:
        """Returns the elements of input number `place`, a vector of integers, None for each that is not known."""
        return self._elements(place)

    def is_alike(self, place: int, axis: int) -> bool:
        """Whether input number `place` is known to be the same all along `axis`, counted from the end."""
        return self._is_alike(place, axis)

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
        functools.partial(_elements_of, op),
        functools.partial(_is_input_alike, op),
        _is_pure(op),
    )


def _is_pure(op: tf.Operation) -> bool:
    has_functions = any(attribute.type in ("func", "list(func)") for attribute in op.op_def.attr)
    return not (op.op_def.is_stateful or has_functions or any(x.dtype == tf.resource for x in op.inputs))


def _attribute_of(op: tf.Operation, name: str) -> Any:
    return op.get_attr(name)


def _value_of(op: tf.Operation, place: int) -> np.ndarray | None:
    return value_of(op.inputs[place])


def _is_input_alike(op: tf.Operation, place: int, axis: int) -> bool:
    """Constants are, and what is repeated, or computed of such on each element, or of each row of a matrix."""
    waiting, number = [op.inputs[place]], 0
    while waiting:
        x, number = waiting.pop(), number + 1
        if x.shape.rank is None or number > _MOST_ALIKE:
            return False
        if x.shape.rank < -axis or x.shape[axis] == 1 or x.op.type == "Fill":
            continue
        if x.op.type in _REPEATING and x.op.inputs[0].shape.rank is not None:
            waiting.append(x.op.inputs[0])
        elif x.op.type in _EACH_ALONE:
            waiting.extend(x.op.inputs)
        elif x.op.type == "MatMul" and axis == -2 and not x.op.get_attr("transpose_a"):
            waiting.append(x.op.inputs[0])
        else:
            value = value_of(x)
            if value is None or (value.size and not np.all(value == np.take(value, [0], axis))):
                return False
    return True


def _elements_of(op: tf.Operation, place: int) -> list[int | None] | None:
    tensor = op.inputs[place]
    if (value := value_of(tensor)) is not None:
        return value.reshape(-1).tolist()
    maker = tensor.op
    if maker.type == "ConcatOffset" and (axis := value_of(maker.inputs[0])) is not None and tensor.shape.rank == 1:
        return [None if number == axis else 0 for number in range(tensor.shape[0])]
    if maker.type not in ("ConcatV2", "Pack"):
        return None
    found: list[int | None] = []
    for part in maker.inputs if maker.type == "Pack" else list(maker.inputs)[:-1]:
        if part.shape.rank is None or (part.shape.rank == 1 and part.shape[0] is None):
            return None
        parts = part.op.inputs if part.op.type == "Pack" else [part]
        for one in parts:
            value = value_of(one)
            number = one.shape.num_elements() if one.shape.rank else 1
            found.extend([None] * number if value is None else value.reshape(-1).tolist())
    return found
