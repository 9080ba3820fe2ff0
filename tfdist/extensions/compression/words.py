"""Narrow numbers in words of 32 bits, several parts to a row.

    codes    c0 c1 c2 c3 | c4 c5 c6 c7        words    w0 w1 s0
    scales   s0                                         one row, (parts side by side)

Parts are cut and joined as float32, whose bits nobody looks at: TensorFlow does so with int32 in the host's memory only.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.transports.kernel_settings import with_zeros


def packed(x: tf.Tensor) -> tf.Tensor:
    """Returns the bits of `x`, (rows, n) of one or two bytes each, padded to whole words: (rows, words) of float32."""
    each = 4 // x.dtype.size
    words = -(-x.shape[1] // each)
    return tf.bitcast(tf.reshape(with_zeros(x, words * each - x.shape[1], 1), [x.shape[0], words, each]), tf.float32)


def unpacked(part: tf.Tensor, dtype: tf.DType, n: int) -> tf.Tensor:
    """Returns the (rows, n) of `dtype` whose bits `part` is; the inverse of `packed`."""
    each = 4 // dtype.size
    found = tf.reshape(tf.bitcast(part, dtype), [part.shape[0], part.shape[1] * each])
    return found[:, :n] if n < found.shape[1] else found


def joined(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns `parts`, (rows, words) of float32 each, side by side: (rows, all words) of int32."""
    return tf.bitcast(parts[0] if len(parts) == 1 else tf.concat(parts, 1), tf.int32)


def parted(words: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
    """Returns the parts of `sizes` words, as float32, of rows of words; the inverse of `joined`."""
    bits = tf.bitcast(words, tf.float32)
    return [bits] if len(sizes) == 1 else tf.split(bits, sizes, 1)
