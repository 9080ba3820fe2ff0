"""Gradients added up over microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class GradientSum:
    """A running sum per variable. Rows of an embedding stay rows: those of all microbatches, one after the other."""

    def __init__(self) -> None:
        self._sums: dict[int, Any] = {}

    def add(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[tf.Tensor]:
        """Adds `gradients`, None for none; returns tensors that exist when the sums do."""
        made = []
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is None:
                continue
            total = _sum(self._sums[id(variable)], gradient) if id(variable) in self._sums else gradient
            self._sums[id(variable)] = total
            made.append(total.values if isinstance(total, tf.IndexedSlices) else total)
        return made

    def of(self, variable: Any) -> Any:
        """Returns the sum for `variable`, None if it had no gradient."""
        return self._sums.get(id(variable))


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([one.values, other.values], 0), tf.concat([one.indices, other.indices], 0), one.dense_shape
        )
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)
