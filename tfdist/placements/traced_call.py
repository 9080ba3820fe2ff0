"""An operation of a graph, as a rule sees it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.placements.call import Call, without_rows
from tfdist.placements.constants import value_of
from tfdist.placements.kinds import Placement
from tfdist.placements.table import is_elementwise

_MOST_ALIKE = 64  # operations that are looked back through
_REPEATING = ("BroadcastTo", "Slice", "Tile")
_OF_OTHER_AXES = ("Bitcast", "Select")  # elementwise ones whose inputs may have fewer axes, or more, at the end


class TracedCall(Call):
    """The `Call` of a traced operation; `are_sizes_equal`: whether all ranks have as many rows; `is_of_agreed`: whether a tensor
    is computed of what ranks have agreed on."""

    def __init__(
        self,
        op: tf.Operation,
        inputs: Sequence[Placement],
        *,
        are_sizes_equal: bool = True,
        is_of_agreed: Callable[[tf.Tensor], bool] = lambda _: False,
    ):
        super().__init__(op.type, op.name, inputs, op.inputs, op.outputs)
        self._op, self._is_of_agreed = op, is_of_agreed
        if not are_sizes_equal:
            self.shapes = list(map(without_rows, self.shapes, self.inputs))

    def attribute(self, name: str) -> Any:
        return self._op.get_attr(name)

    def value(self, place: int) -> np.ndarray | None:
        return value_of(self.read[place])

    def is_alike(self, place: int, axis: int) -> bool:
        """Constants are, and what is repeated, or computed of such on each element, or of each row of a matrix. What has as many
        numbers as all ranks have rows is not beside a rank's own."""
        waiting, number = [self.read[place]], 0
        while waiting:
            x, number = waiting.pop(), number + 1
            if x.shape.rank is None or number > _MOST_ALIKE:
                return False
            if x.shape.rank < -axis or x.shape[axis] == 1:
                continue
            if x.op.type == "Fill":
                if self._is_of_agreed(x.op.inputs[0]):
                    return False
                continue
            keeps_axes = x.op.type == "StridedSlice" and not any(map(x.op.get_attr, ("new_axis_mask", "shrink_axis_mask")))
            if (x.op.type in _REPEATING or keeps_axes) and x.op.inputs[0].shape.rank is not None:
                waiting.append(x.op.inputs[0])
            elif x.op.type == "BiasAdd" or (is_elementwise(x.op.type) and x.op.type not in _OF_OTHER_AXES):
                waiting.extend(x.op.inputs)
            elif x.op.type == "MatMul" and axis == -2 and not x.op.get_attr("transpose_a"):
                waiting.append(x.op.inputs[0])
            else:
                value = value_of(x)
                if value is None or (value.size and not np.all(value == np.take(value, [0], axis))):
                    return False
        return True

    def elements(self, place: int) -> list[int | None] | None:
        tensor = self.read[place]
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
            for one in part.op.inputs if part.op.type == "Pack" else [part]:
                value = value_of(one)
                number = one.shape.num_elements() if one.shape.rank else 1
                found.extend([None] * number if value is None else value.reshape(-1).tolist())
        return found
