"""Settings of TensorFlow's collective kernels, and the dtypes in which they move bytes."""

import re
from typing import Any

import tensorflow as tf

from tfdist.collectives.emission import Emission

# No timeout: TensorFlow 2.21 leaves about two sleeping threads for every collective that runs with one, until it would
# have expired, so that a training run of some minutes exhausts the process's threads. Within one process a missing peer is found
# while tracing (`CollectivePlan`).
TIMEOUT_SECONDS = 0.0

# Dtypes that no collective carries, and those in which they travel.
WIDENED = {tf.bool: tf.int32, tf.uint8: tf.int32, tf.int8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32}


def byte_dtype(dtype: tf.DType) -> tf.DType:
    """Returns a dtype of the same width in which `dtype` travels where bytes are only moved."""
    return {tf.bfloat16: tf.float16}.get(dtype, dtype)


def reduction_dtype(program: Emission, dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which a kernel of `program` reduces what is of `dtype`."""
    return dtype if program.is_on_cpu else {tf.bfloat16: tf.float32, tf.int32: tf.int64}.get(dtype, dtype)


def as_bytes(x: tf.Tensor) -> tf.Tensor:
    """Returns `x` in its `byte_dtype`."""
    return from_bytes(x, byte_dtype(x.dtype))


def from_bytes(moved: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the bits of `moved` as `dtype`."""
    return moved if moved.dtype == dtype else tf.bitcast(moved, dtype)


def with_zeros(x: tf.Tensor, missing: int | tf.Tensor, axis: int = 0) -> tf.Tensor:
    """Returns `x` followed by `missing` zeros along `axis`; its other dimensions are known.

    `tf.pad` has no kernel for int64 and uint16 on GPUs: labels would travel to the host and back.
    """
    if isinstance(missing, int) and missing == 0:
        return x
    zeros = tf.zeros([*x.shape[:axis], missing, *x.shape[axis + 1 :]], x.dtype)
    return tf.concat([x, zeros], axis)


def kernel_arguments(
    program: Emission, hint: str, group_size: int, group_key: int, instance_key: Any, label: str
) -> dict[str, Any]:
    """Returns the arguments by which a kernel finds its group (the key) and its call in it (the instance key), and its name."""
    return {
        "name": "Collective_" + re.sub("[^A-Za-z0-9_.]", "_", label),
        "group_size": program.constant(group_size),
        "group_key": program.constant(group_key),
        "instance_key": instance_key,
        "communication_hint": hint,
        "timeout_seconds": TIMEOUT_SECONDS,
    }
