"""The rows of all data ranks, of tensors of any dtype that batches have."""

import tensorflow as tf

from tfdist.collectives.group_ops import DTYPES
from tfdist.collectives.ops import all_gather
from tfdist.collectives.transports.kernel_settings import WIDENED

_WIDENED = {**WIDENED, tf.uint32: tf.int64}


def can_be_gathered(tensor: tf.Tensor) -> bool:
    """Whether `gather_rows` takes a dense `tensor` of this dtype."""
    return tensor.dtype.is_complex or tensor.dtype in DTYPES or tensor.dtype in _WIDENED


def gather_rows(tensor: tf.Tensor, label: str) -> tf.Tensor:
    """Returns the rows of `tensor` of all data ranks, in their order, as `all_gather` does; some ranks may have none.

    Other axes may have lengths that only run time knows: they are the same on all ranks, which have rows of one batch.
    """
    if tensor.dtype.is_complex:
        parts = gather_rows(tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1), label)
        return tf.complex(*tf.unstack(parts, axis=-1))
    carried = tf.cast(tensor, _WIDENED.get(tensor.dtype, tensor.dtype))
    if carried.shape[1:].is_fully_defined():
        whole = all_gather(carried, "data", uneven=True, label=label)
    else:
        flat = all_gather(tf.reshape(carried, [-1]), "data", uneven=True, label=label)
        inner = tf.shape(carried)[1:]
        # Not -1, which no rows of no length would leave open.
        rows = tf.math.floordiv(tf.size(flat), tf.maximum(tf.reduce_prod(inner), 1))
        whole = tf.reshape(flat, tf.concat([[rows], inner], 0))
    whole.set_shape([None, *tensor.shape[1:]] if tensor.shape.rank else None)
    return tf.cast(whole, tensor.dtype)
