"""The arguments `given` to a metric's update, in any structure; the dense tensors in it, and their masks.

A metric that is no sum over rows is given the rows of all ranks. Several metrics of a step gather the same predictions once.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives import Part, RankProgram, can_be_gathered, gather_rows
from tfdist.placements.telling import as_whole

_MASK = "_keras_mask"  # where Keras keeps the mask of a tensor


def mapped(function: Callable[[tf.Tensor], tf.Tensor], given: Any) -> Any:
    """Returns `given` with `function(x)` in the place of each dense tensor, and of its mask."""

    def of(x: Any) -> Any:
        if not isinstance(x, tf.Tensor):
            return x
        made = function(x)
        if isinstance(mask := getattr(x, _MASK, None), tf.Tensor):
            setattr(made, _MASK, function(mask))
        return made

    return tf.nest.map_structure(of, given)


def dense(given: Any) -> list[tf.Tensor]:
    """Returns the dense tensors, and then their masks."""
    found = [x for x in tf.nest.flatten(given) if isinstance(x, tf.Tensor)]
    return [*found, *(mask for x in found if isinstance(mask := getattr(x, _MASK, None), tf.Tensor))]


def others(given: Any) -> list[tf.RaggedTensor | tf.SparseTensor]:
    """Returns the ragged and sparse tensors."""
    return [x for x in tf.nest.flatten(given) if isinstance(x, tf.RaggedTensor | tf.SparseTensor)]


def why_not(given: Any) -> str:
    """Returns why the arguments `given` cannot be gathered, "" if they can."""
    if found := others(given):
        return f"a {type(found[0]).__name__} cannot be gathered from the ranks"
    for tensor in dense(given):
        if not can_be_gathered(tensor):
            return f"a tensor of dtype {tensor.dtype.name} cannot be gathered from the ranks"
    return ""


class GatheredBatch(Part):
    """The tensors that one rank has gathered in one trace. A part of its state."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._gathered: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}  # with what was gathered: a number is that of a living object

    def of(self, given: Any) -> Any:
        """Returns the arguments `given` with all ranks' rows, and numbers as they are on one device."""
        return mapped(self._whole, given)

    def _whole(self, tensor: tf.Tensor) -> tf.Tensor:
        if id(tensor) not in self._gathered:
            is_number = tensor.shape.rank == 0
            whole = as_whole(self._program, tensor, "metrics/scalar") if is_number else gather_rows(tensor, "metrics/rows")
            self._gathered[id(tensor)] = tensor, whole
        # Another object each time: a mask is set on it.
        return tf.identity(self._gathered[id(tensor)][1])
