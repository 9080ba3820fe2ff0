"""How many of the rows that a layer is called on are the batch's own.

Layers cannot be relied on to compute on no rows. Where a slice of a batch has none, they are given one row, and what they make of
it is dropped. What a layer notes about its examples, such as their mean, must leave that row out: here it finds how many count.
"""

from __future__ import annotations

import contextvars

import tensorflow as tf

# How many of the first rows of what a layer is called on here are the batch's, an int32 scalar; None: all.
OWN_ROWS: contextvars.ContextVar[tf.Tensor | None] = contextvars.ContextVar("own_rows", default=None)
