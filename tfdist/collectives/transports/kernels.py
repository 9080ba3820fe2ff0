"""TensorFlow's collective kernels as transports: the ring on CPUs and on virtual GPUs, NCCL on physical GPUs.

Facts behind what differs (TensorFlow 2.21):

* Only the hint "nccl" on a GPU group selects NCCL; "auto" means the ring, on GPUs too.
* ReduceScatterV2 has no CPU kernel: there a reduce-scatter is an all-to-all and a local sum, which moves the same bytes.
* NCCL kernels refuse bfloat16 and int32 reductions (read in the source, not run): they are widened for the trip.
* CollectiveGatherV2 and the broadcasts have no bfloat16 kernel: bfloat16 travels there as float16 bits.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives.plan import Ranks, TensorLike
from tfdist.collectives.program import RankProgram
from tfdist.collectives.transports.kernel_messages import KernelMessages
from tfdist.collectives.transports.kernel_settings import as_bytes, byte_dtype, from_bytes, keep, kernel_arguments
from tfdist.collectives.transports.member_order import in_group_order, in_kernel_order
from tfdist.collectives.transports.transport import Transport, sum_dtype

# AllToAllV2 names a message by its two ranks, written without a separator: in a larger group of one process "1" to "11"
# and "11" to "1" are one name, and blocks are silently exchanged.
_ALL_TO_ALL_RANKS = 11
_MERGE_OPS = {"sum": "Add", "max": "Max", "min": "Min"}


class Kernels(Transport):
    """What the ring and NCCL have in common."""

    hint: str  # `communication_hint` of the kernels

    def __init__(self) -> None:
        self.messages = KernelMessages(self.hint)

    def reduction_dtype(self, dtype: tf.DType) -> tf.DType:
        """Returns the dtype in which a reduction of `dtype` travels."""
        return dtype

    def all_reduce(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, reduce_op: str, label: str) -> tf.Tensor:
        carried = tf.cast(x, self.reduction_dtype(x.dtype))
        reduced = tf.raw_ops.CollectiveReduceV2(
            input=carried,
            merge_op=_MERGE_OPS[reduce_op],
            final_op="Id",
            ordering_token=[program.token()],
            max_subdivs_per_device=-1,
            **self._begin(program, "all_reduce", carried, ranks, label),
        )
        return tf.cast(reduced, x.dtype)

    def all_gather(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        carried = as_bytes(x)
        gathered = tf.raw_ops.CollectiveGatherV2(
            input=carried, ordering_token=[program.token()], **self._begin(program, "all_gather", carried, ranks, label)
        )
        gathered = in_group_order(program, from_bytes(gathered, x.dtype), ranks, rows_of=x.shape)
        rows = x.shape[0] * len(ranks) if x.shape[0] is not None else None
        gathered.set_shape([rows, *x.shape[1:]])
        return gathered

    def all_to_all(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        if len(ranks) > _ALL_TO_ALL_RANKS:
            gathered = self.all_gather(program, x, ranks, label)
            return tf.reshape(gathered, [len(ranks), *x.shape])[:, ranks.index(program.rank)]
        return in_group_order(program, self._all_to_all(program, x, ranks, "all_to_all", label), ranks)

    def broadcast(self, program: RankProgram, x: TensorLike, ranks: Ranks, source: int, op: str, label: str) -> tf.Tensor:
        is_source = program.rank == source
        carried = as_bytes(x) if is_source else tf.TensorSpec(x.shape, byte_dtype(x.dtype))
        arguments = self._begin(program, op, carried, ranks, label, source)
        # The broadcast kernels take no ordering token, and a send or receive whose output nobody reads is pruned, so that its
        # peer waits for ever. Reading the token before and writing it after puts them on the chain and keeps them alive.
        with tf.control_dependencies([tf.raw_ops.ReadVariableOp(resource=program.token(), dtype=tf.int64)]):
            if is_source:
                moved = tf.raw_ops.CollectiveBcastSendV2(input=carried, **arguments)
            else:
                shape = tf.constant(x.shape.as_list(), tf.int32)
                moved = tf.raw_ops.CollectiveBcastRecvV2(T=carried.dtype, shape=shape, **arguments)
        keep(program.token(), moved)
        return from_bytes(moved if is_source else tf.ensure_shape(moved, x.shape), x.dtype)

    def _begin(
        self, program: RankProgram, op: str, x: TensorLike, ranks: Ranks, label: str, source: int | None = None
    ) -> dict[str, Any]:
        """Registers one collective and returns the arguments that every kernel takes."""
        key = program.begin(op, x, ranks, label, source)
        return kernel_arguments(program, self.hint, len(ranks), program.communicator.group_key(ranks), key)

    def _all_to_all(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, op: str, label: str) -> tf.Tensor:
        """Sends `x[i]` to the i-th of `ranks`; what arrives is in the kernels' order."""
        x = in_kernel_order(program, x, ranks)
        return tf.raw_ops.CollectiveAllToAllV2(
            input=x, ordering_token=[program.token()], is_stateless=False, **self._begin(program, op, x, ranks, label)
        )


class Ring(Kernels):
    """TensorFlow's ring: within a process over the graph's edges, between processes over gRPC."""

    hint = "ring"

    def reduce_scatter(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str, dtype: tf.DType) -> tf.Tensor:
        """An all-to-all and a sum: what is summed where it arrives travels in x's dtype."""
        wide = sum_dtype(x.dtype)
        if len(ranks) > _ALL_TO_ALL_RANKS:
            reduced = self.all_reduce(program, tf.cast(x, wide), ranks, "sum", label)[ranks.index(program.rank)]
            return tf.cast(reduced, dtype)
        received = self._all_to_all(program, x, ranks, "reduce_scatter", label)
        return tf.cast(tf.reduce_sum(tf.cast(received, wide), axis=0), dtype)


class Nccl(Kernels):
    """NCCL, between whole physical GPUs."""

    hint = "nccl"

    def reduction_dtype(self, dtype: tf.DType) -> tf.DType:
        return {tf.bfloat16: tf.float32, tf.int32: tf.int64}.get(dtype, dtype)

    def reduce_scatter(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str, dtype: tf.DType) -> tf.Tensor:
        """What is summed on the way travels in the wider of both dtypes."""
        wide = self.reduction_dtype(dtype if dtype.size > x.dtype.size else x.dtype)
        carried = in_kernel_order(program, tf.cast(x, wide), ranks)
        reduced = tf.raw_ops.CollectiveReduceScatterV2(
            input=carried,
            merge_op="Add",
            final_op="Id",
            ordering_token=[program.token()],
            **self._begin(program, "reduce_scatter", carried, ranks, label),
        )
        return tf.cast(tf.ensure_shape(tf.reshape(reduced, tf.shape(x)[1:]), x.shape[1:]), dtype)


RING = Ring()
NCCL = Nccl()
