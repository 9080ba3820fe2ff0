"""What one rank gets of a distributed dataset's elements: structures of specs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def of_one_rank(element_spec: Any) -> Any:
    """Returns the specs of one rank's values, from those of the values of all; None for a value that is always None."""
    return tf.nest.map_structure(_of_one_rank, element_spec)


def _of_one_rank(spec: Any) -> Any:
    spec = getattr(spec, "_value_specs", (spec,))[0]
    return None if isinstance(spec, tf.NoneTensorSpec) else spec


def has_ragged_or_sparse(specs: Any) -> bool:
    """Whether one of `specs` is not of a dense tensor."""
    return any(isinstance(spec, tf.RaggedTensorSpec | tf.SparseTensorSpec) for spec in tf.nest.flatten(specs))


def has_known_shapes(specs: Any) -> bool:
    """Whether all but the number of rows is known of each of `specs`."""
    return all(_has_known_shape(spec) for spec in tf.nest.flatten(specs))


def _has_known_shape(spec: Any) -> bool:
    is_dense = isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None
    return spec is None or is_dense and spec.shape[1:].is_fully_defined()
