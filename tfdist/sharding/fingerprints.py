"""Whether tensors are the same on several ranks, of which none sends them."""

import tensorflow as tf

_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def as_integers(x: tf.Tensor) -> tf.Tensor:
    """Returns an int64 for each element of `x`, flat: of strings one that another string hardly has."""
    if x.dtype == tf.string:
        x = tf.strings.to_hash_bucket_fast(x, 2**62)
    elif x.dtype.is_floating and x.dtype.size in _BITS:
        x = tf.bitcast(x, _BITS[x.dtype.size])
    return tf.reshape(tf.cast(x, tf.int64), [-1])


def fingerprint(x: tf.Tensor) -> tf.Tensor:
    """Returns an int64 that changes, all but surely, when a bit of `x` or the order of its elements does: a sum modulo 2**64."""
    flat = as_integers(x)
    count = tf.size(flat, out_type=tf.int64)
    return tf.reduce_sum(flat * (2 * tf.range(count) + 1)) + count
