"""An operation that has run eagerly, as a rule sees it: not how many rows a rank has, nor values that are not constant.

A rank knows the sizes and the values of all that it has; other ranks have others, and all are to find the same.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.graphs import eager_operations
from tfdist.placements.call import Call, without_rows
from tfdist.placements.kinds import Lengths, Placement, Replicate

_MOST_READ = 4096  # numbers of a constant that a rule may look at


class EagerCall(Call):
    """The `Call` of an operation of the type `type` that has run; `attributes` are names and values in turns."""

    def __init__(
        self,
        type: str,
        placements: Sequence[Placement],
        are_constant: Sequence[bool],
        inputs: Sequence[tf.Tensor],
        attributes: Sequence[Any],
        outputs: Sequence[tf.Tensor],
    ):
        super().__init__(type, "", placements, inputs, outputs)
        self._placements, self._are_constant = placements, are_constant
        self.attributes = attributes
        self.shapes = list(map(without_rows, self.shapes, placements))

    def with_own_rows(self) -> "EagerCall":
        """Returns the same with the sizes that the rank's own rows have."""
        made = copy.copy(self)
        made.shapes = [x.shape for x in self.read]
        return made

    def attribute(self, name: str) -> Any:
        value = dict(zip(self.attributes[::2], self.attributes[1::2], strict=True)).get(name)
        value = eager_operations.default_of(self.type, name) if value is None else value
        return value.encode() if isinstance(value, str) else tf.as_dtype(value) if name.endswith("T") else value

    def value(self, place: int) -> np.ndarray | None:
        x = self.read[place]
        is_known = self._are_constant[place] or self._placements[place] == Replicate() and x.dtype.is_integer
        is_read = is_known and x.dtype not in (tf.resource, tf.variant) and (x.shape.num_elements() or 0) <= _MOST_READ
        return np.asarray(x.numpy()) if is_read else None

    def elements(self, place: int) -> list[int | None] | None:
        placement = self._placements[place]
        if isinstance(placement, Lengths):
            return [None if axis == placement.axis else n for axis, n in enumerate(self.read[place].numpy().tolist())]
        found = self.value(place)
        return None if found is None else found.reshape(-1).tolist()

    def is_alike(self, place: int, axis: int) -> bool:
        shape, found = self.read[place].shape, self.value(place)
        is_short = shape.rank < -axis or shape[axis] == 1
        return is_short or (found is not None and bool(np.all(found == np.take(found, [0], axis))))
