"""Messages between two processes by TensorFlow's kernels: a collective in a group of two.

TensorFlow has no other point-to-point transport between processes. Over the ring it is a broadcast, not on the chain of
collectives, and each direction has a group of its own.

With NCCL it is a sum to which the receiver gives nothing (see "who receives" in `transports.kernels`), and on the chain.
A GPU runs one of NCCL's kernels at a time, and one that has begun holds the GPU until its other side has come. So two ranks that
begin two messages, or a message and a collective, in different orders wait for each other for ever; and in which order TensorFlow
begins what is not on a chain, nobody can tell.
"""

from typing import Any

import tensorflow as tf

from tfdist.collectives.emission import Emission
from tfdist.collectives.instance_keys import log2_ceiling, power_of_two
from tfdist.collectives.plan import TensorLike
from tfdist.collectives.transports.kernel_settings import (
    WIDENED,
    byte_dtype,
    from_bytes,
    kernel_arguments,
    reduction_dtype,
    with_zeros,
)
from tfdist.collectives.transports.transport import MessageTransport


class KernelMessages(MessageTransport):
    """Messages by kernels with the `communication_hint` `hint`.

    A number of rows that is known at run time only is padded to a power of two: a message's key is bound to one shape for the
    life of the process.
    """

    def __init__(self, hint: str):
        self._hint = hint

    def send(self, program: Emission, x: tf.Tensor, destination: int, label: str) -> None:
        padded = None
        if x.shape.rank and x.shape[0] is None:
            rows = tf.shape(x)[0]
            with program.on_host():
                padded = power_of_two(rows)
            x = tf.ensure_shape(with_zeros(x, padded - rows), x.shape)
        x = tf.cast(x, WIDENED.get(x.dtype, x.dtype))
        carried = _as(x, self._wire_dtype(program, x.dtype))
        self._move(program, carried, None, padded, program.rank, destination, label)

    def receive(self, program: Emission, spec: tf.TensorSpec, rows: tf.Tensor, source: int, label: str) -> tf.Tensor:
        dtype = WIDENED.get(spec.dtype, spec.dtype)
        carried, padded = tf.TensorSpec(spec.shape, self._wire_dtype(program, dtype)), None
        if spec.shape.rank and spec.shape[0] is None:
            with program.on_host():
                padded = power_of_two(rows)
                shape = tf.concat([[padded], tf.constant(spec.shape[1:].as_list(), tf.int32)], 0)
        else:
            shape = tf.constant(spec.shape.as_list(), tf.int32)
        received = self._move(program, carried, shape, padded, source, program.rank, label)
        received = _as(tf.ensure_shape(received, spec.shape), dtype)
        return tf.cast(received if padded is None else received[:rows], spec.dtype)

    def _wire_dtype(self, program: Emission, dtype: tf.DType) -> tf.DType:
        return byte_dtype(dtype)

    def _move(
        self, program: Emission, x: TensorLike, shape: Any, rows: tf.Tensor | None, source: int, destination: int, label: str
    ) -> tf.Tensor:
        """Moves `x`, of which a receiver gives the `shape`, as a tensor, and the dtype; `rows`: how many, where it is unknown."""
        key = program.begin_message(x, source, destination, label)
        if rows is not None:
            with program.on_host():
                key += log2_ceiling(rows)
        arguments = kernel_arguments(program, self._hint, 2, program.communicator.message_key(source, destination), key, label)
        token = program.communicator.message_token(program.rank)
        return by_broadcast(x, shape, token, arguments)


class OrderedMessages(KernelMessages):
    """Messages on the chain of the rank's collectives, in the plan as what `send` emits: a pair has one group for both ways."""

    is_in_order = True

    def _wire_dtype(self, program: Emission, dtype: tf.DType) -> tf.DType:
        return reduction_dtype(program, dtype)

    def _move(
        self, program: Emission, x: TensorLike, shape: Any, rows: tf.Tensor | None, source: int, destination: int, label: str
    ) -> tf.Tensor:
        pair = (min(source, destination), max(source, destination))
        key = program.begin("send", x, pair, label, source, rows=rows)
        arguments = kernel_arguments(program, self._hint, 2, program.communicator.group_key(pair), key, label)
        return by_sum(x, shape, {**arguments, "ordering_token": [program.turn(pair, key)]})


def _as(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the bits of `x` in a `dtype` of the same width, or its numbers in a wider or narrower one."""
    return from_bytes(x, dtype) if x.dtype.size == dtype.size else tf.cast(x, dtype)


def by_broadcast(x: TensorLike, shape: Any, token: tf.Tensor, arguments: dict[str, Any]) -> tf.Tensor:
    """Returns the `x` of one member of a group, by a broadcast with a kernel's `arguments`; the others give `shape` and dtype.

    A send or receive whose output nobody reads is pruned, so that its peer waits for ever: it is kept by a write to the variable
    `token` afterwards.
    """
    if tf.is_tensor(x):
        moved = tf.raw_ops.CollectiveBcastSendV2(input=x, **arguments)
    else:
        moved = tf.raw_ops.CollectiveBcastRecvV2(T=x.dtype, shape=shape, **arguments)
    with tf.control_dependencies([moved]):
        tf.raw_ops.AssignAddVariableOp(resource=token, value=tf.zeros([], tf.int64))
    return moved


def reduced(given: tf.Tensor, arguments: dict[str, Any], reduce_op: str = "sum") -> tf.Tensor:
    """Returns what the members give, reduced by `reduce_op` ("sum", "max", "min"), by a kernel's `arguments`."""
    merge_op = {"sum": "Add", "max": "Max", "min": "Min"}[reduce_op]
    return tf.raw_ops.CollectiveReduceV2(input=given, merge_op=merge_op, final_op="Id", max_subdivs_per_device=-1, **arguments)


def by_sum(x: TensorLike, shape: Any, arguments: dict[str, Any]) -> tf.Tensor:
    """Returns what `by_broadcast` does, by a sum to which receivers give negative zeros: they change no bit of what is sent."""
    return reduced(x if tf.is_tensor(x) else tf.fill(shape, tf.cast(-0.0, x.dtype)), arguments)
