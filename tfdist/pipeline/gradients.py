"""Gradients added up over microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class GradientSum:
    """A running sum of gradients for each variable.

    The gradient of an embedding stays rows of its table, those of all microbatches one after the other, while they are fewer than
    the table's own rows.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Any] = {}

    def add(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[tf.Tensor]:
        """Adds one gradient for each of `variables`, None for none; returns tensors that exist when the sums do."""
        made = []
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is None:
                continue
            total = added(self._sums.get(id(variable)), gradient)
            self._sums[id(variable)] = total
            made.append(total.values if isinstance(total, tf.IndexedSlices) else total)
        return made

    def of(self, variable: Any) -> Any:
        """Returns the sum for `variable`, None if the variable had no gradient."""
        return self._sums.get(id(variable))


def added(one: Any, other: Any) -> Any:
    """Returns the sum of two gradients of one variable, each a tensor, rows of a table, or None."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices) and _are_few([one, other]):
        return tf.IndexedSlices(
            tf.concat([one.values, other.values], 0), tf.concat([one.indices, other.indices], 0), one.dense_shape
        )
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def _are_few(slices: Sequence[tf.IndexedSlices]) -> bool:
    """Whether the gradients have fewer rows than their table, as far as the sizes are known."""
    table = tf.get_static_value(slices[0].dense_shape)
    rows = [one.values.shape[0] for one in slices]
    return table is None or None in rows or sum(rows) < table[0]
