"""What a rule sees of an operation that has run eagerly: not how many rows a rank has, nor values that are not constant.

A rank knows the sizes and the values of all that it has; other ranks have others, and all are to find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.graphs import eager_operations
from tfdist.placements.call import Call
from tfdist.placements.kinds import Lengths, Placement, Replicate, Shard

_MOST_READ = 4096  # numbers of a constant that a rule may look at


def eager_call(
    kind: str,
    placements: Sequence[Placement],
    are_constant: Sequence[bool],
    inputs: Sequence[tf.Tensor],
    attributes: Sequence[Any],
    outputs: Sequence[tf.Tensor],
) -> Call:
    """Returns the `Call` of an operation of the type `kind` that has run; `attributes` are names and values in turns."""
    given = dict(zip(attributes[::2], attributes[1::2], strict=True))

    def attribute(name: str) -> Any:
        value = given.get(name)
        value = eager_operations.default_of(kind, name) if value is None else value
        return value.encode() if isinstance(value, str) else tf.as_dtype(value) if name.endswith("T") else value

    def value(place: int) -> np.ndarray | None:
        x = inputs[place]
        is_known = are_constant[place] or placements[place] == Replicate() and x.dtype.is_integer
        is_read = is_known and x.dtype not in (tf.resource, tf.variant) and (x.shape.num_elements() or 0) <= _MOST_READ
        return np.asarray(x.numpy()) if is_read else None

    def elements(place: int) -> list[int | None] | None:
        placement = placements[place]
        if isinstance(placement, Lengths):
            return [None if axis == placement.axis else n for axis, n in enumerate(inputs[place].numpy().tolist())]
        found = value(place)
        return None if found is None else found.reshape(-1).tolist()

    def is_alike(place: int, axis: int) -> bool:
        shape, found = inputs[place].shape, value(place)
        is_short = shape.rank < -axis or shape[axis] == 1
        return is_short or (found is not None and bool(np.all(found == np.take(found, [0], axis))))

    return Call(
        kind,
        "",
        tuple(placements),
        tuple(_without_rows(x.shape, placement) for x, placement in zip(inputs, placements, strict=True)),
        tuple(x.dtype for x in inputs),
        tuple(x.shape for x in outputs),
        attribute,
        value,
        elements,
        is_alike,
        eager_operations.is_pure(kind),
    )


def _without_rows(shape: tf.TensorShape, placement: Placement) -> tf.TensorShape:
    if not isinstance(placement, Shard) or placement.axis >= (shape.rank or 0):
        return shape
    return tf.TensorShape([None if axis == placement.axis else size for axis, size in enumerate(shape)])
