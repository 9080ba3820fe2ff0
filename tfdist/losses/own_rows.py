"""How many of the rows that a layer is called on are the batch's own.

Layers cannot be relied on to compute on no rows. Where a slice of a batch has none, they are given one row, and what they make of
it is dropped. What a layer notes about its examples, such as their mean, must leave that row out: here it finds how many count.
"""

from __future__ import annotations

import contextlib
import contextvars

import tensorflow as tf

from tfdist import temporary

_own_rows: contextvars.ContextVar[tf.Tensor | None] = contextvars.ContextVar("own_rows", default=None)


def own_rows() -> tf.Tensor | None:
    """Returns how many of the first rows of what a layer is called on here are the batch's, an int32 scalar; None: all."""
    return _own_rows.get()


def with_own_rows(rows: tf.Tensor | None) -> contextlib.AbstractContextManager[None]:
    """A block in which layers are called on `rows` rows of the batch, and perhaps on one that is not; None: on no such row."""
    return temporary.context_value(_own_rows, rows)
