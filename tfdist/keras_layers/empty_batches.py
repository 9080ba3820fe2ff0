"""Convolutions and poolings of no rows: a rank whose piece of the batch is empty.

A global batch of fewer rows than ranks, often the last of an epoch, leaves some ranks without any. Most operations compute empty
results and zero gradients of that; TensorFlow's kernels for convolutions and poolings on CPUs do not: they raise, return wrong
shapes or uninitialised gradients, or end the process. Here, inside replicas, such an operation is fed one row of zeros instead of
none, and its result is cut back to no rows:

    rows > 0     y = f(x)
    rows = 0     y = f(0)[:0]      the gradients of kernels are zero, and that of x is empty

A batch whose size is known while tracing (`drop_remainder=True`) needs no such care and gets none; else it costs two branches an
operation and no copy. Operations of TensorFlow itself (`tf.nn.conv2d`), and layers that cannot work on no rows by what they
compute, such as a mean over the batch, are the author's.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives import rank_program
from tfdist.placements.repair import meant_of_own_rows


def fed_with_rows(operation: Callable[..., tf.Tensor], inputs: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Returns `operation(inputs, ...)`, computed from a row of zeros where `inputs` has none."""
    inputs = tf.convert_to_tensor(inputs)
    rows = tf.shape(inputs)[0]
    inner = tf.shape(inputs)[1:]
    program = rank_program()
    with meant_of_own_rows(program, like=inputs) as found:
        some = tf.cond(rows > 0, lambda: inputs, lambda: tf.zeros(tf.concat([[1], inner], 0), inputs.dtype))
        found.append(some := tf.ensure_shape(some, [None, *inputs.shape[1:]]))
    outputs = operation(some, *args, **kwargs)
    with meant_of_own_rows(program, like=outputs) as found:
        some = tf.cond(rows > 0, lambda: outputs, lambda: outputs[:0])
        found.append(some := tf.ensure_shape(some, [None, *outputs.shape[1:]]))
    return some
