"""An operation as a rule sees it: its type, its attributes, its inputs' placements; no graph, no rank."""

import abc
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import tensorflow as tf

from tfdist.graphs import eager_operations
from tfdist.placements.kinds import Placement, Replicate, Shard, Unknown, Why


class Call(abc.ABC):
    """One operation and the placements of what it is given.

    Attributes:
        type: the type of the operation.
        name: its name.
        inputs: the placements of its inputs, none of which is `Unknown` where a rule sees it.
        shapes: the static shapes of its inputs, those of a rank.
        dtypes: their dtypes.
        results: the static shapes of its outputs.
        read: its inputs.
        number: how many outputs it has.
    """

    def __init__(
        self, type: str, name: str, inputs: Sequence[Placement], read: Sequence[tf.Tensor], returned: Sequence[tf.Tensor]
    ):
        self.type, self.name, self.inputs = type, name, tuple(inputs)
        self.read, self._returned, self.number = read, returned, len(returned)

    @functools.cached_property
    def shapes(self) -> Sequence[tf.TensorShape]:
        return [x.shape for x in self.read]

    @functools.cached_property
    def dtypes(self) -> Sequence[tf.DType]:
        return [x.dtype for x in self.read]

    @functools.cached_property
    def results(self) -> Sequence[tf.TensorShape]:
        return [x.shape for x in self._returned]

    def given(self, inputs: Sequence[Placement]) -> Self:
        """Returns the same with inputs of other placements."""
        made = copy.copy(self)
        made.inputs = tuple(inputs)
        return made

    @property
    def is_pure(self) -> bool:
        """Whether it is no more than a function of its inputs: no state, no resource, and no function in it."""
        return eager_operations.is_pure(self.type) and tf.resource not in self.dtypes

    @abc.abstractmethod
    def attribute(self, name: str) -> Any:
        """Returns the attribute `name` of the operation. Raises ValueError if it has none."""

    @abc.abstractmethod
    def value(self, place: int) -> np.ndarray | None:
        """Returns the value of the input number `place`, where it is known when the operation is made; else None."""

    @abc.abstractmethod
    def elements(self, place: int) -> list[int | None] | None:
        """Returns the elements of input number `place`, a vector of integers, None for each that is not known."""

    @abc.abstractmethod
    def is_alike(self, place: int, axis: int) -> bool:
        """Whether input number `place` is known to be the same all along `axis`, counted from the end."""

    def rows(self, place: int, why: Why = Why.MEET) -> Shard:
        """Returns the rows that input number `place` is. Raises NotKnown if it is something else."""
        given = self.inputs[place]
        if not isinstance(given, Shard):
            raise NotKnown(why)
        return given

    def are_same(self, *places: int) -> bool:
        """Whether inputs number `places` are the same on all ranks."""
        return all(isinstance(self.inputs[place], Replicate) for place in places)

    def need(self, is_so: bool, why: Why = Why.MEET) -> None:
        """Raises NotKnown unless `is_so`."""
        if not is_so:
            raise NotKnown(why)

    def unknown(self, why: Why) -> Unknown:
        """Returns the placement of what this operation makes unknown."""
        return Unknown(why, f"{self.type} {self.name!r}")


class NotKnown(Exception):
    """Raised by a rule: what the operation returns is not known."""

    def __init__(self, why: Why):
        super().__init__(why)
        self.why = why


Rule: TypeAlias = Callable[[Call], Placement | list[Placement]]
"""Returns the placement of each output, or one that is that of all. Raises NotKnown."""


def without_rows(shape: tf.TensorShape, placement: Placement) -> tf.TensorShape:
    """Returns the shape of a tensor whose rows, if it has some, are of a number that is not known."""
    if not isinstance(placement, Shard) or placement.axis >= (shape.rank or 0):
        return shape
    return tf.TensorShape([None if axis == placement.axis else size for axis, size in enumerate(shape)])
