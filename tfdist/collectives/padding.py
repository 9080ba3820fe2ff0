"""Rows of zeros behind a tensor's own."""

from __future__ import annotations

import tensorflow as tf


def with_zeros(x: tf.Tensor, missing: int | tf.Tensor, axis: int = 0) -> tf.Tensor:
    """Returns `x` with `missing` zeros behind it along `axis`; its other dimensions are known.

    `tf.pad` has no kernel for int64 on GPUs: labels would travel to the host and back.
    """
    if isinstance(missing, int) and missing == 0:
        return x
    zeros = tf.zeros([*x.shape[:axis], missing, *x.shape[axis + 1 :]], x.dtype)
    return tf.concat([x, zeros], axis)
