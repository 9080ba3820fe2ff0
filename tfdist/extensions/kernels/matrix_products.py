"""Attention, and projections of several axes, as products of matrices.

Keras's attention is two `tf.einsum`, each of which, like each of the four in their gradients, moves the heads to the front
before it multiplies and back after. Here query, key and value are moved once and kept so. And a layer such as `EinsumDense` that
contracts the last axes of its input with the first ones of its kernel is one product of two matrices, where Keras multiplies
example by example, and sums up as many gradients of the kernel.

Keras's values to rounding. Equations of any other form are left to Keras.
"""

import math
import re
from typing import Any

import keras
import tensorflow as tf

# Free labels, contracted ones; these again, other free ones; the free ones.
_PRODUCT = re.compile(r"([a-zA-Z]+)([a-zA-Z]+),\2([a-zA-Z]+)->\1\3")
# What stands for no score, as in Keras.
_MASKED = -0.7 * 3.38953e38


def attention(query: Any, key: Any, value: Any, bias: Any, mask: Any, is_causal: bool, scale: Any) -> tf.Tensor:
    """Returns the attention's output: like query, key and value (batch, positions, heads, size), all of one dtype.

    Scores are multiplied with `scale`; `bias` is added to them, and they count where `mask` is True: both broadcast, or are None.
    """
    # The scores, their softmax and what is added to them: at least float32, as in Keras.
    dtype = keras.backend.result_type(query.dtype.name, "float32")
    scale = tf.cast(scale, dtype)
    if query.dtype == dtype:
        query *= scale  # smaller than the scores
    query, key, value = (_heads_swapped(x) for x in (query, key, value))
    scores = tf.matmul(query, key, transpose_b=True)
    if query.dtype != dtype:
        scores = tf.cast(scores, dtype) * scale
    if bias is not None:
        scores += tf.cast(bias, dtype)
    masked = tf.constant(_MASKED, dtype)
    if is_causal:
        positions = tf.shape(scores)[-2:]
        causal = tf.linalg.band_part(tf.ones(positions, tf.bool), -1, 0)
        if mask is None and bias is None:
            # The masked scores are lost in the sums. Every row has another, so that their gradients are zero, as of `tf.where`.
            scores += tf.where(causal, tf.zeros([], dtype), masked)
        else:
            mask = causal if mask is None else tf.logical_and(mask, causal)
    if mask is not None:
        scores = tf.where(mask, scores, masked)
    weights = tf.cast(tf.nn.softmax(scores), value.dtype)
    return _heads_swapped(tf.matmul(weights, value))


def _heads_swapped(x: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x, [0, 2, 1, 3])


def projection(x: tf.Tensor, kernel: tf.Tensor, contracted: int) -> tf.Tensor:
    """Contracts the last axes of `x`, that many, with the first ones of `kernel`, whose shape is static."""
    size = math.prod(kernel.shape[:contracted])
    result = tf.matmul(tf.reshape(x, [-1, size]), tf.reshape(kernel, [size, -1]))
    leading = x.shape[:-contracted].as_list()
    if leading.count(None) > 1:
        leading = [tf.shape(x)[axis] if length is None else length for axis, length in enumerate(leading)]
    return tf.reshape(result, [*(-1 if length is None else length for length in leading), *kernel.shape[contracted:]])


def contracted_axes(equation: str) -> int:
    """Returns how many axes an equation such as "abc,cde->abde" contracts, the last of the first operand with the first of
    the second; 0 if it is of another form. Each operand must have others."""
    found = _PRODUCT.fullmatch(equation.replace(" ", ""))
    labels = "".join(found.groups()) if found else ""
    return len(found[2]) if found and len(set(labels)) == len(labels) else 0
