"""TensorFlow's collective kernels as transports: the ring on CPUs and on virtual GPUs, NCCL on physical GPUs.

Facts behind what differs (TensorFlow 2.21):

* Only the hint "nccl" on a GPU group selects NCCL; "auto" means the ring, on GPUs too.
* ReduceScatterV2 has no CPU kernel: there a reduce-scatter is an all-to-all and a local sum, which moves the same bytes.
* On GPUs TensorFlow refuses all-reduces of bfloat16 and int32, by the ring as by NCCL: they are widened for the trip, or avoided.
* CollectiveGatherV2 and the broadcasts have no bfloat16 kernel, and NCCL's path none of any kind: it travels as float16 bits.
* NCCL's all-to-all counts the members of its own process only: between processes it would exchange the wrong blocks.

Note: one order on all devices. NCCL's collectives must begin in the same order on all devices of a group, and of groups that
overlap. Within a process TensorFlow's `NcclManager` sees to that: a collective waits there until all of the process's devices
have come to it, and then stands in the queues of all of them, in one step under one lock. Each queue is a part of one sequence,
and of any collectives that are not over one is first on all of its devices: no circle is possible. So each begins when its input
is there (`has_own_turns`). Between processes every process has a sequence of its own, and nothing tells when a collective has
begun, only when it is over: there they stand on the rank's chain, each after the end of the one before it.

Two calls with one key would be one collective to the manager: those of a key form a chain (`RankProgram.turn`).

Note: who receives. `NcclManager` has NCCL wait for what a GPU has queued on behalf of members that give an input. A broadcast's
receiver gives none, so NCCL writes at once to memory that the allocator has given it, and that products queued before may still
use. So with NCCL every member gives something: broadcasts and messages are all-reduces to which receivers give negative zeros.
They take the memory of what is received and no more, which an all-gather would not.

Note: half-precision sums on GPUs, n elements, N ranks. Bytes that a rank sends:

    reduce-scatter   4 n (N-1)/N   as float32, which the kernel sums on the way
                     2 n (N-1)/N   an all-to-all of 16 bits each, which the receiver sums in float32
                     2 n (N-1)     an all-gather of them: never fewer than the first, and as many for two ranks
    all-reduce       8 n (N-1)/N   as float32
                     4 n (N-1)/N   the all-to-all, and an all-gather of the sums, rounded once

So the all-to-all is taken wherever there is one: for reduce-scatters always, for all-reduces of bfloat16 where the bytes are
worth a second message. Between processes NCCL has none, and float32 travels. docs/gpus.md says what else was considered.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tfdist.collectives.communicator import Communicator
from tfdist.collectives.padding import with_zeros
from tfdist.collectives.plan import Ranks, TensorLike
from tfdist.collectives.program import RankProgram
from tfdist.collectives.transports.kernel_messages import KernelMessages, OrderedMessages, by_sum, nothing
from tfdist.collectives.transports.kernel_settings import (
    as_bytes,
    byte_dtype,
    from_bytes,
    kernel_arguments,
    on_chain,
    reduction_dtype,
)
from tfdist.collectives.transports.member_order import in_group_order, in_kernel_order
from tfdist.collectives.transports.transport import Transport, sum_dtype

# AllToAllV2 names a message by its two ranks, written without a separator: in a larger group of one process "1" to "11"
# and "11" to "1" are one name, and blocks are silently exchanged.
_ALL_TO_ALL_RANKS = 11
# Of bfloat16: below it a message of twice the bytes is taken to cost less than two messages. Not measured on GPUs.
_TWO_MESSAGES_FROM_BYTES = 2**20
_MERGE_OPS = {"sum": "Add", "max": "Max", "min": "Min"}


class Kernels(Transport):
    """What the ring and NCCL have in common."""

    hint: str  # `communication_hint` of the kernels
    messages_kind: type[KernelMessages] = KernelMessages

    def __init__(self) -> None:
        self.messages = self.messages_kind(self.hint)

    def all_reduce(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, reduce_op: str, label: str) -> tf.Tensor:
        carried = tf.cast(x, reduction_dtype(program, x.dtype))
        is_halved = x.dtype == tf.bfloat16 != carried.dtype and reduce_op == "sum" and self.exchanges(program.communicator, ranks)
        if is_halved and _bytes_of(x) >= _TWO_MESSAGES_FROM_BYTES:
            return self._all_reduce_in_two_messages(program, x, ranks, label)
        reduced = tf.raw_ops.CollectiveReduceV2(
            input=carried,
            merge_op=_MERGE_OPS[reduce_op],
            final_op="Id",
            max_subdivs_per_device=-1,
            **self._begin_in_turn(program, "all_reduce", carried, ranks, label),
        )
        return tf.cast(reduced, x.dtype)

    def all_gather(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        carried = as_bytes(x)
        arguments = self._begin_in_turn(program, "all_gather", carried, ranks, label)
        gathered = tf.raw_ops.CollectiveGatherV2(input=carried, **arguments)
        gathered = in_group_order(program, from_bytes(gathered, x.dtype), ranks, rows_of=x.shape)
        rows = x.shape[0] * len(ranks) if x.shape[0] is not None else None
        gathered.set_shape([rows, *x.shape[1:]])
        return gathered

    def all_to_all(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        if not self.exchanges(program.communicator, ranks):
            gathered = self.all_gather(program, x, ranks, label)
            return tf.reshape(gathered, [len(ranks), *x.shape])[:, ranks.index(program.rank)]
        return in_group_order(program, self._all_to_all(program, x, ranks, "all_to_all", label), ranks)

    def broadcast(self, program: RankProgram, x: TensorLike, ranks: Ranks, source: int, op: str, label: str) -> tf.Tensor:
        is_source = program.rank == source
        carried = as_bytes(x) if is_source else tf.TensorSpec(x.shape, byte_dtype(x.dtype))
        arguments = self._begin(program, op, carried, ranks, label, source)

        def emit() -> tf.Tensor:
            if is_source:
                return tf.raw_ops.CollectiveBcastSendV2(input=carried, **arguments)
            shape = tf.constant(x.shape.as_list(), tf.int32)
            return tf.raw_ops.CollectiveBcastRecvV2(T=carried.dtype, shape=shape, **arguments)

        moved = on_chain(program, emit)
        return from_bytes(moved if is_source else tf.ensure_shape(moved, x.shape), x.dtype)

    def _begin(
        self, program: RankProgram, op: str, x: TensorLike, ranks: Ranks, label: str, source: int | None = None
    ) -> dict[str, Any]:
        """Registers one collective and returns the arguments that every kernel takes."""
        key = program.begin(op, x, ranks, label, source)
        return kernel_arguments(program, self.hint, len(ranks), program.communicator.group_key(ranks), key)

    def _begin_in_turn(
        self, program: RankProgram, op: str, x: TensorLike, ranks: Ranks, label: str, source: int | None = None
    ) -> dict[str, Any]:
        """Registers one collective by a kernel that takes an ordering token: it is among the arguments."""
        arguments = self._begin(program, op, x, ranks, label, source)
        return {**arguments, "ordering_token": [program.turn(ranks, arguments["instance_key"])]}

    def _all_to_all(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, op: str, label: str) -> tf.Tensor:
        """Sends `x[i]` to the i-th of `ranks`; what arrives is in the kernels' order."""
        carried = in_kernel_order(program, x if program.is_on_cpu else as_bytes(x), ranks)
        arguments = self._begin_in_turn(program, op, carried, ranks, label)
        moved = tf.raw_ops.CollectiveAllToAllV2(input=carried, is_stateless=False, **arguments)
        return from_bytes(moved, x.dtype)

    def _sum_of_exchanged(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str, dtype: tf.DType) -> tf.Tensor:
        """A reduce-scatter as an all-to-all and a sum: what is summed where it arrives travels in x's dtype."""
        received = self._all_to_all(program, x, ranks, "reduce_scatter", label)
        return tf.cast(tf.reduce_sum(tf.cast(received, sum_dtype(x.dtype)), axis=0), dtype)

    def _all_reduce_in_two_messages(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        """Sums `x`: each rank sums its part of what it is sent, and all gather the sums, in x's dtype. See the note above."""
        elements = x.shape.num_elements()
        count = tf.size(x) if elements is None else elements
        flat = with_zeros(tf.reshape(x, [-1]), -count % len(ranks))
        parts = tf.reshape(flat, [len(ranks), -1])  # (N, ceil(n/N))
        part = self._sum_of_exchanged(program, parts, ranks, f"{label}/scatter", x.dtype)
        whole = self.all_gather(program, part, ranks, f"{label}/gather")
        return tf.ensure_shape(tf.reshape(whole[:count], tf.shape(x)), x.shape)


class Ring(Kernels):
    """TensorFlow's ring: within a process over the graph's edges, between processes over gRPC."""

    hint = "ring"

    def exchanges(self, communicator: Communicator, ranks: Ranks) -> bool:
        return len(ranks) <= _ALL_TO_ALL_RANKS

    def reduce_scatter(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str, dtype: tf.DType) -> tf.Tensor:
        if self.exchanges(program.communicator, ranks):
            return self._sum_of_exchanged(program, x, ranks, label, dtype)
        reduced = self.all_reduce(program, tf.cast(x, sum_dtype(x.dtype)), ranks, "sum", label)
        return tf.cast(reduced[ranks.index(program.rank)], dtype)


class Nccl(Kernels):
    """NCCL, between whole physical GPUs."""

    hint = "nccl"
    messages_kind = OrderedMessages
    has_own_turns = True
    sums_to_move = True
    waits_for_queue = True

    def exchanges(self, communicator: Communicator, ranks: Ranks) -> bool:
        return set(ranks) <= set(communicator.process_ranks)

    def broadcast(self, program: RankProgram, x: TensorLike, ranks: Ranks, source: int, op: str, label: str) -> tf.Tensor:
        """A sum to which the other members give nothing: see the note on who receives."""
        dtype = reduction_dtype(program, x.dtype)
        given = tf.cast(x, dtype) if program.rank == source else nothing(x.shape, dtype)
        moved = by_sum(given, **self._begin_in_turn(program, op, given, ranks, label, source))
        return tf.cast(moved, x.dtype)

    def reduce_scatter(self, program: RankProgram, x: tf.Tensor, ranks: Ranks, label: str, dtype: tf.DType) -> tf.Tensor:
        """What is summed on the way travels in the wider of both dtypes."""
        if sum_dtype(x.dtype) != x.dtype and self.exchanges(program.communicator, ranks):
            return self._sum_of_exchanged(program, x, ranks, label, dtype)
        wide = reduction_dtype(program, dtype if dtype.size > x.dtype.size else x.dtype)
        carried = in_kernel_order(program, tf.cast(x, wide), ranks)
        reduced = tf.raw_ops.CollectiveReduceScatterV2(
            input=carried,
            merge_op="Add",
            final_op="Id",
            **self._begin_in_turn(program, "reduce_scatter", carried, ranks, label),
        )
        return tf.cast(tf.ensure_shape(tf.reshape(reduced, tf.shape(x)[1:]), x.shape[1:]), dtype)


def _bytes_of(x: tf.Tensor) -> float:
    """Returns the bytes of `x`: of a size known at run time only, any number of them."""
    elements = x.shape.num_elements()
    return math.inf if elements is None else elements * x.dtype.size


RING = Ring()
NCCL = Nccl()
