"""What a metric is updated with, `given`: its arguments, in any structure; the dense tensors in it, and their masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

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
