"""TensorFlow's collective kernels as transports: the ring on CPUs and on virtual GPUs, NCCL on physical GPUs.

Why they differ (TensorFlow 2.21):

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

Two calls with one key would be one collective to the manager: those of a key form a chain (`Emission.turn`).

Note: who receives. `NcclManager` has NCCL wait for what a GPU has queued on behalf of members that give an input. A broadcast's
receiver gives none, so NCCL writes at once to memory that the allocator has given it, and that products queued before may still
use. So with NCCL every member gives something: broadcasts and messages are all-reduces to which receivers give negative zeros.
They take the memory of what is received and no more, which an all-gather would not.

Note: half-precision sums on GPUs. An all-to-all, whose receiver sums in float32, is taken wherever there is one: for
reduce-scatters always, for all-reduces of bfloat16 where the bytes are worth a second message. Between processes NCCL has none,
and float32 travels. docs/notes/gpus.md (half precision on the wire) has the bytes of each way, and what else was considered.
"""

from typing import Any

import tensorflow as tf

from tfdist.collectives.communicator import Communicator
from tfdist.collectives.emission import Emission
from tfdist.collectives.plan import Ranks, TensorLike
from tfdist.collectives.transports.kernel_messages import KernelMessages, OrderedMessages, by_broadcast, by_sum, reduced
from tfdist.collectives.transports.kernel_settings import (
    as_bytes,
    byte_dtype,
    from_bytes,
    kernel_arguments,
    reduction_dtype,
    with_zeros,
)
from tfdist.collectives.transports.member_order import in_group_order, in_kernel_order
from tfdist.collectives.transports.transport import Transport, sum_dtype

# AllToAllV2 names a message by its two ranks, written without a separator: in a larger group of one process "1" to "11"
# and "11" to "1" are one name, and blocks are silently exchanged.
_ALL_TO_ALL_RANKS = 11
# Of bfloat16: below it a message of twice the bytes is taken to cost less than two messages. Not measured on GPUs.
_TWO_MESSAGES_FROM_BYTES = 2**20


class Kernels(Transport):
    """Common code of the ring and NCCL."""

    def all_reduce(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str, reduce_op: str) -> tf.Tensor:
        carried = tf.cast(x, reduction_dtype(program, x.dtype))
        elements = x.shape.num_elements()
        is_large = elements is None or elements * x.dtype.size >= _TWO_MESSAGES_FROM_BYTES
        is_widened = x.dtype == tf.bfloat16 != carried.dtype and reduce_op == "sum"
        if is_large and is_widened and self.exchanges(program.communicator, ranks):
            return self._all_reduce_in_two_messages(program, x, ranks, label)
        arguments = self._begin(program, "all_reduce", carried, ranks, label)
        return tf.cast(reduced(carried, arguments, reduce_op), x.dtype)

    def all_gather(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        carried = as_bytes(x)
        arguments = self._begin(program, "all_gather", carried, ranks, label)
        gathered = tf.raw_ops.CollectiveGatherV2(input=carried, **arguments)
        gathered = in_group_order(program, from_bytes(gathered, x.dtype), ranks)
        rows = x.shape[0] * len(ranks) if x.shape[0] is not None else None
        gathered.set_shape([rows, *x.shape[1:]])
        return gathered

    def all_to_all(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        if not self.exchanges(program.communicator, ranks):
            gathered = self.all_gather(program, x, ranks, label)
            return tf.reshape(gathered, [len(ranks), *x.shape])[:, ranks.index(program.rank)]
        return in_group_order(program, self._all_to_all(program, x, ranks, "all_to_all", label), ranks)

    def _begin(
        self, program: Emission, op: str, x: TensorLike, ranks: Ranks, label: str, source: int | None = None
    ) -> dict[str, Any]:
        """Registers one collective, by a kernel that takes an ordering token, and returns the kernel's arguments."""
        key = program.begin(op, x, ranks, label, source)
        arguments = kernel_arguments(program, self.hint, len(ranks), program.communicator.group_key(ranks), key, label)
        return {**arguments, "ordering_token": [program.turn(ranks, key)]}

    def _all_to_all(self, program: Emission, x: tf.Tensor, ranks: Ranks, op: str, label: str) -> tf.Tensor:
        """Sends `x[i]` to the i-th of `ranks`; what arrives is in the kernels' order."""
        carried = in_kernel_order(program, x if program.is_on_cpu else as_bytes(x), ranks)
        arguments = self._begin(program, op, carried, ranks, label)
        moved = tf.raw_ops.CollectiveAllToAllV2(input=carried, is_stateless=False, **arguments)
        return from_bytes(moved, x.dtype)

    def _sum_of_exchanged(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str, dtype: tf.DType) -> tf.Tensor:
        """A reduce-scatter as an all-to-all and a sum: what is summed where it arrives travels in x's dtype."""
        received = self._all_to_all(program, x, ranks, "reduce_scatter", label)
        return tf.cast(tf.reduce_sum(tf.cast(received, sum_dtype(x.dtype)), axis=0), dtype)

    def _all_reduce_in_two_messages(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
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
    messages = KernelMessages(hint)

    def exchanges(self, communicator: Communicator, ranks: Ranks) -> bool:
        return len(ranks) <= _ALL_TO_ALL_RANKS

    def broadcast(self, program: Emission, x: TensorLike, ranks: Ranks, source: int, op: str, label: str) -> tf.Tensor:
        is_source = program.rank == source
        carried = as_bytes(x) if is_source else tf.TensorSpec(x.shape, byte_dtype(x.dtype))
        key = program.begin(op, carried, ranks, label, source)
        arguments = kernel_arguments(program, self.hint, len(ranks), program.communicator.group_key(ranks), key, label)
        shape = None if is_source else tf.constant(x.shape.as_list(), tf.int32)
        # The kernel takes no ordering token: to read the rank's before and to write it after puts it on the chain.
        with tf.control_dependencies([tf.raw_ops.ReadVariableOp(resource=program.token(), dtype=tf.int64)]):
            moved = by_broadcast(carried, shape, program.token(), arguments)
        return from_bytes(moved if is_source else tf.ensure_shape(moved, x.shape), x.dtype)

    def reduce_scatter(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str, dtype: tf.DType) -> tf.Tensor:
        if self.exchanges(program.communicator, ranks):
            return self._sum_of_exchanged(program, x, ranks, label, dtype)
        reduced = self.all_reduce(program, tf.cast(x, sum_dtype(x.dtype)), ranks, label, "sum")
        return tf.cast(reduced[ranks.index(program.rank)], dtype)


class Nccl(Kernels):
    """NCCL, between whole physical GPUs."""

    hint = "nccl"
    messages = OrderedMessages(hint)
    has_own_turns = True
    sums_to_move = True
    waits_for_queue = True

    def exchanges(self, communicator: Communicator, ranks: Ranks) -> bool:
        return set(ranks) <= set(communicator.process_ranks)

    def broadcast(self, program: Emission, x: TensorLike, ranks: Ranks, source: int, op: str, label: str) -> tf.Tensor:
        """A sum to which the other members give nothing: see the note on who receives."""
        dtype = reduction_dtype(program, x.dtype)
        carried = tf.cast(x, dtype) if program.rank == source else tf.TensorSpec(x.shape, dtype)
        arguments = self._begin(program, op, carried, ranks, label, source)
        return tf.cast(by_sum(carried, x.shape, arguments), x.dtype)

    def reduce_scatter(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str, dtype: tf.DType) -> tf.Tensor:
        """NCCL sums on the way, in the wider of both dtypes."""
        if sum_dtype(x.dtype) != x.dtype and self.exchanges(program.communicator, ranks):
            return self._sum_of_exchanged(program, x, ranks, label, dtype)
        wide = reduction_dtype(program, dtype if dtype.size > x.dtype.size else x.dtype)
        carried = in_kernel_order(program, tf.cast(x, wide), ranks)
        arguments = self._begin(program, "reduce_scatter", carried, ranks, label)
        reduced = tf.raw_ops.CollectiveReduceScatterV2(input=carried, merge_op="Add", final_op="Id", **arguments)
        return tf.cast(tf.ensure_shape(tf.reshape(reduced, tf.shape(x)[1:]), x.shape[1:]), dtype)


RING = Ring()
NCCL = Nccl()
