"""What every collective kernel of TensorFlow is told, and in which dtype it moves bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives.program import RankProgram

# No timeout: TensorFlow 2.21 leaves about two sleeping threads behind for every collective that runs with one, until it would
# have expired, so that a training run of some minutes exhausts the process's threads. Within one process a missing peer is found
# while tracing (`CollectivePlan`).
TIMEOUT_SECONDS = 0.0

# Dtypes that no collective carries, and those in which they travel.
WIDENED = {tf.bool: tf.int32, tf.uint8: tf.int32, tf.int8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32}


def byte_dtype(dtype: tf.DType) -> tf.DType:
    """Returns a dtype of the same width in which `dtype` travels where bytes are only moved."""
    return {tf.bfloat16: tf.float16}.get(dtype, dtype)


def reduction_dtype(program: RankProgram, dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which a kernel of `program` reduces what is of `dtype`."""
    return dtype if program.is_on_cpu else {tf.bfloat16: tf.float32, tf.int32: tf.int64}.get(dtype, dtype)


def as_bytes(x: tf.Tensor) -> tf.Tensor:
    """Returns `x` in its `byte_dtype`."""
    return from_bytes(x, byte_dtype(x.dtype))


def from_bytes(moved: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the bits of `moved` as `dtype`."""
    return moved if moved.dtype == dtype else tf.bitcast(moved, dtype)


def keep(token: tf.Tensor, moved: tf.Tensor) -> None:
    """Has `moved` run although nobody may read it, by a write to the variable `token` afterwards."""
    with tf.control_dependencies([moved]):
        tf.raw_ops.AssignAddVariableOp(resource=token, value=tf.zeros([], tf.int64))


def on_chain(program: RankProgram, emit: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Returns what `emit` makes by a kernel that takes no ordering token: a broadcast's.

    A send or receive whose output nobody reads is pruned, so that its peer waits for ever. Reading the rank's token before and
    writing it after puts it on the chain and keeps it alive.
    """
    with tf.control_dependencies([tf.raw_ops.ReadVariableOp(resource=program.token(), dtype=tf.int64)]):
        moved = emit()
    keep(program.token(), moved)
    return moved


def kernel_arguments(program: RankProgram, hint: str, group_size: int, group_key: int, instance_key: Any) -> dict[str, Any]:
    """Returns the arguments by which a kernel finds its group (the key) and its call in it (the instance key)."""
    return {
        "group_size": program.constant(group_size),
        "group_key": program.constant(group_key),
        "instance_key": instance_key,
        "communication_hint": hint,
        "timeout_seconds": TIMEOUT_SECONDS,
    }
