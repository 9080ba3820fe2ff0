"""Integers of a graph that are known when it is traced: the order of axes, say, that `tf.nn.softmax` over one axis computes.

`tf.get_static_value` knows constants, and not what is computed of the number of axes, nor `tf.shape(x)[0]` where it is known.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

_COMPUTED: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "AddV2": np.add,
    "Cast": np.asarray,
    "ConcatV2": lambda *parts: np.concatenate(parts[:-1], axis=int(parts[-1])),
    "ExpandDims": lambda x, axis: np.expand_dims(x, int(axis)),
    "Identity": np.asarray,
    "Mul": np.multiply,
    "Pack": lambda *parts: np.stack(parts),
    "Prod": lambda x, axes: np.prod(x, axis=tuple(np.ravel(axes))),
    "Range": np.arange,
    "Sub": np.subtract,
}


def value_of(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns the value of `tensor`, of few integers, or cast from these; None: it is not known before the graph runs."""
    known = tf.get_static_value(tensor)
    if known is not None or not (tensor.dtype.is_integer or tensor.op.type == "Cast"):
        return known
    if tensor.op.type == "StridedSlice" and tensor.shape.rank == 0:  # one of a list
        numbers, place = (value_of(x) for x in tensor.op.inputs[:2])
        return None if numbers is None or place is None or numbers.ndim != 1 else numbers[int(place[0])]
    if tensor.op.type not in _COMPUTED:
        return None
    inputs = [value_of(x) for x in tensor.op.inputs]
    return None if any(x is None for x in inputs) else _COMPUTED[tensor.op.type](*inputs)
