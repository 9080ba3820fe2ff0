"""The raw collective ops: the only file that calls them. No gradients, no shape rules beyond what the kernels need.

Each function emits one op on the program's device, chained on its ordering token. Groups of one rank and tensors without
elements never reach the kernels (an empty tensor crashes several of them): they return at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import memory_collectives
from tfdist.collectives.plan import CollectiveRecord
from tfdist.collectives.program import Communicator, RankProgram
from tfdist.mesh import MESH_AXES

# Dtypes that no collective carries, and those in which they travel.
WIDENED = {tf.bool: tf.int32, tf.uint8: tf.int32, tf.int8: tf.int32, tf.int16: tf.int32, tf.uint16: tf.int32}
_DTYPES = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)

# AllToAllV2 names a message by its two ranks, written without a separator: in a larger group of one process "1" to "11"
# and "11" to "1" are one name, and blocks are silently exchanged.
_ALL_TO_ALL_RANKS = 11


def check_dtype(op: str, x: tf.Tensor | tf.TensorSpec) -> None:
    """Raises ValueError when the collective `op` cannot carry `x.dtype`."""
    if x.dtype not in _DTYPES:
        raise ValueError(
            errors.message(
                f"`{op}` carries {[dtype.name for dtype in _DTYPES]}.",
                dtype=x.dtype.name,
                fix="Cast the tensor first, for example a bool to int32.",
            )
        )


def is_trivial(x: tf.Tensor, ranks: tuple[int, ...]) -> bool:
    """Whether nothing has to move: a group of one rank, or a tensor that is known to be empty."""
    return len(ranks) == 1 or 0 in x.shape.as_list()


def _also_eager(function: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Lets `function(program, x, ranks, ..., label)` run for an eager program too: with the other ranks, when all have come."""

    @functools.wraps(function)
    def op(program: RankProgram, x: tf.Tensor, ranks: tuple[int, ...], *arguments: Any, **options: Any) -> tf.Tensor:
        if not program.is_eager or is_trivial(x, ranks):
            return function(program, x, ranks, *arguments, **options)
        *settings, label = arguments
        record = CollectiveRecord(function.__name__, ranks, tuple(x.shape), x.dtype.name, label)
        key = (function.__name__, ranks, *settings, *options.items())
        return program.together(record, key, lambda rank, value: function(rank, value, ranks, *arguments, **options), x)

    return op


@_also_eager
def all_reduce(program: RankProgram, x: tf.Tensor, ranks: tuple[int, ...], reduce_op: str, label: str) -> tf.Tensor:
    """Elementwise `reduce_op` ("sum", "max", "min") over `ranks`."""
    if is_trivial(x, ranks):
        return tf.identity(x)
    dtype = x.dtype
    if meets_in_memory(program, ranks):
        return memory_collectives.all_reduce(program, x, ranks, reduce_op, label, summed_in=_summed_in(dtype))
    wide = program.transport.reduction_dtype(dtype)
    pieces = _pieces(program, x, x.shape.num_elements(), len(ranks))
    with tf.device(program.device):
        if len(pieces) > 1:
            parts = [
                all_reduce(program, part, ranks, reduce_op, f"{label}/{number}")
                for number, part in enumerate(tf.split(tf.reshape(x, [-1]), pieces))
            ]
            return tf.reshape(tf.concat(parts, 0), x.shape)
        x = tf.cast(x, wide)
        reduced = tf.raw_ops.CollectiveReduceV2(
            input=x,
            merge_op={"sum": "Add", "max": "Max", "min": "Min"}[reduce_op],
            final_op="Id",
            ordering_token=[program.token()],
            max_subdivs_per_device=-1,
            **program.begin("all_reduce", x, ranks, label),
        )
        return tf.cast(reduced, dtype)


@_also_eager
def all_gather(program: RankProgram, x: tf.Tensor, ranks: tuple[int, ...], label: str) -> tf.Tensor:
    """Concatenates `x` of all `ranks` along axis 0, in group order. Equal shapes on all ranks."""
    if is_trivial(x, ranks):
        return tf.concat([x] * len(ranks), 0)
    if meets_in_memory(program, ranks):
        return memory_collectives.all_gather(program, x, ranks, label)
    pieces = _pieces(program, x, x.shape.num_elements())
    with tf.device(program.device):
        if len(pieces) > 1:
            parts = [
                tf.reshape(all_gather(program, part, ranks, f"{label}/{number}"), [len(ranks), -1])
                for number, part in enumerate(tf.split(tf.reshape(x, [-1]), pieces))
            ]
            return tf.reshape(tf.concat(parts, 1), [len(ranks) * x.shape[0], *x.shape[1:]])
        carried = _as_bytes(program, x)
        gathered = tf.raw_ops.CollectiveGatherV2(
            input=carried, ordering_token=[program.token()], **program.begin("all_gather", carried, ranks, label)
        )
        gathered = tf.bitcast(gathered, x.dtype) if carried.dtype != x.dtype else gathered
        order = _kernel_order(program, ranks)
        if order != sorted(order):
            stacked = tf.reshape(gathered, [len(ranks), -1, *x.shape[1:]])
            gathered = tf.reshape(tf.gather(stacked, _inverse(order)), tf.shape(gathered))
        rows = x.shape[0] * len(ranks) if x.shape[0] is not None else None
        gathered.set_shape([rows, *x.shape[1:]])
        return gathered


@_also_eager
def all_to_all(program: RankProgram, x: tf.Tensor, ranks: tuple[int, ...], label: str) -> tf.Tensor:
    """Sends `x[i]` to the i-th of `ranks` and returns what each sent here, stacked: (N, ...) to (N, ...)."""
    if is_trivial(x, ranks):
        return tf.identity(x)
    if meets_in_memory(program, ranks):
        return memory_collectives.all_to_all(program, x, ranks, label)
    if len(ranks) > _ALL_TO_ALL_RANKS:
        gathered = all_gather(program, x, ranks, label)
        return tf.reshape(gathered, [len(ranks), *x.shape])[:, ranks.index(program.rank)]
    with tf.device(program.device):
        received = _all_to_all(program, x, ranks, "all_to_all", label)
        order = _kernel_order(program, ranks)
        return received if order == sorted(order) else tf.gather(received, _inverse(order))


@_also_eager
def reduce_scatter(
    program: RankProgram, x: tf.Tensor, ranks: tuple[int, ...], label: str, *, dtype: tf.DType | None = None
) -> tf.Tensor:
    """Sums `x`, of shape (N, ...), over `ranks`, and returns row i to the i-th rank: (N, ...) to (...), as `dtype` (None: x's).

    What is summed where it arrives travels in x's dtype; what is summed on the way, in the wider of the two.
    """
    dtype = dtype or x.dtype
    if is_trivial(x, ranks):
        return tf.cast(x[0], dtype)
    if meets_in_memory(program, ranks):
        return _reduce_scatter_in_memory(program, [x], x, ranks, label, dtype)[0]
    transport = program.transport
    with tf.device(program.device):
        if not transport.has_reduce_scatter:
            # Summed wider than it travelled: a half-precision wire does not mean a half-precision sum.
            wide = _summed_in(x.dtype)
            if len(ranks) > _ALL_TO_ALL_RANKS:
                reduced = all_reduce(program, tf.cast(x, wide), ranks, "sum", label)[ranks.index(program.rank)]
                return tf.cast(reduced, dtype)
            pieces = _pieces(program, x, x.shape[1:].num_elements())
            if len(pieces) > 1:
                parts = [
                    reduce_scatter(program, part, ranks, f"{label}/{number}", dtype=dtype)
                    for number, part in enumerate(tf.split(tf.reshape(x, [len(ranks), -1]), pieces, 1))
                ]
                return tf.reshape(tf.concat(parts, 0), x.shape[1:])
            received = _all_to_all(program, x, ranks, "reduce_scatter", label)
            return tf.cast(tf.reduce_sum(tf.cast(received, wide), axis=0), dtype)
        wide = transport.reduction_dtype(dtype if dtype.size > x.dtype.size else x.dtype)
        carried = _in_kernel_order(program, tf.cast(x, wide), ranks)
        reduced = tf.raw_ops.CollectiveReduceScatterV2(
            input=carried,
            merge_op="Add",
            final_op="Id",
            ordering_token=[program.token()],
            **program.begin("reduce_scatter", carried, ranks, label),
        )
        return tf.cast(tf.ensure_shape(tf.reshape(reduced, tf.shape(x)[1:]), x.shape[1:]), dtype)


def all_gather_parts(program: RankProgram, parts: Sequence[tf.Tensor], ranks: tuple[int, ...], label: str) -> list[tf.Tensor]:
    """All-gathers vectors of one dtype in one message; returns of each the (N, L) of all `ranks`, flattened or not."""
    lengths = [part.shape[0] for part in parts]
    packed = tf.TensorSpec([sum(lengths)], parts[0].dtype)
    if meets_in_memory(program, ranks) and not is_trivial(packed, ranks):
        return memory_collectives.all_gather_parts(program, parts, packed, ranks, label)
    if len(parts) == 1:
        return [all_gather(program, parts[0], ranks, label)]
    with tf.device(program.device):
        gathered = all_gather(program, tf.concat(parts, program.constant(0)), ranks, label)
        rows = tf.reshape(gathered, program.constant([len(ranks), sum(lengths)]))
        return tf.split(rows, program.constant(lengths), program.constant(1), num=len(lengths))


def reduce_scatter_parts(
    program: RankProgram, parts: Sequence[tf.Tensor], ranks: tuple[int, ...], label: str, *, dtype: tf.DType
) -> list[tf.Tensor]:
    """`reduce_scatter` of several (N, L) of one dtype in one message; returns of each this rank's (L,), as `dtype`."""
    lengths = [part.shape[1] for part in parts]
    packed = tf.TensorSpec([len(ranks), sum(lengths)], parts[0].dtype)
    if meets_in_memory(program, ranks) and not is_trivial(packed, ranks):
        return _reduce_scatter_in_memory(program, parts, packed, ranks, label, dtype)
    if len(parts) == 1:
        return [reduce_scatter(program, parts[0], ranks, label, dtype=dtype)]
    with tf.device(program.device):
        reduced = reduce_scatter(program, tf.concat(parts, program.constant(1)), ranks, label, dtype=dtype)
        return tf.split(reduced, program.constant(lengths), program.constant(0), num=len(lengths))


def meets_in_memory(program: RankProgram, ranks: tuple[int, ...]) -> bool:
    """Whether the collectives of `ranks` go through memory that they share."""
    return ranks in program.communicator.exchanges and not program.is_eager


def broadcast(
    program: RankProgram, x: tf.Tensor, shape: tf.TensorShape, ranks: tuple[int, ...], source: int, label: str
) -> tf.Tensor:
    """Returns on every one of `ranks` the `x` of `source`, one of them, of static `shape`; elsewhere only its dtype matters."""
    if program.rank == source:
        return broadcast_send(program, x, ranks, "broadcast", label)
    return broadcast_receive(program, tf.TensorShape(shape), x.dtype, ranks, source, "broadcast", label)


def broadcast_send(program: RankProgram, x: tf.Tensor, ranks: tuple[int, ...], op: str, label: str) -> tf.Tensor:
    """Sends `x` to the other members of `ranks`; returns `x` once it has left."""
    if is_trivial(x, ranks):
        return tf.identity(x)
    if program.is_eager:
        return _broadcast_eagerly(program, x, ranks, program.rank, op, label)
    if meets_in_memory(program, ranks):
        return memory_collectives.broadcast_send(program, x, ranks, op, label)
    with tf.device(program.device):
        carried = _as_bytes(program, x)
        arguments = program.begin(op, carried, ranks, label, source=program.rank)
        with _chained(program):
            sent = tf.raw_ops.CollectiveBcastSendV2(input=carried, **arguments)
        _extend_chain(program, sent)
        return tf.bitcast(sent, x.dtype) if carried.dtype != x.dtype else sent


def broadcast_receive(
    program: RankProgram,
    shape: tf.TensorShape,
    dtype: tf.DType,
    ranks: tuple[int, ...],
    source: int,
    op: str,
    label: str,
) -> tf.Tensor:
    """Receives a tensor of static `shape` and `dtype` that `source`, one of `ranks`, sends with `broadcast_send`."""
    carried = program.transport.byte_dtype(dtype)
    like = tf.TensorSpec(shape, carried)
    if is_trivial(like, ranks):
        return tf.zeros(shape, dtype)
    if program.is_eager:
        return _broadcast_eagerly(program, tf.zeros(shape, dtype), ranks, source, op, label)
    if meets_in_memory(program, ranks):
        return memory_collectives.broadcast_receive(program, tf.TensorSpec(shape, dtype), ranks, source, op, label)
    with tf.device(program.device):
        arguments = program.begin(op, like, ranks, label, source=source)
        with _chained(program):
            received = tf.raw_ops.CollectiveBcastRecvV2(T=carried, shape=tf.constant(shape.as_list(), tf.int32), **arguments)
        _extend_chain(program, received)
        received = tf.ensure_shape(received, shape)
        return tf.bitcast(received, dtype) if carried != dtype else received


def edge_send(program: RankProgram, x: tf.Tensor, destination: int, label: str) -> None:
    """Sends `x`, of static shape but for the number of rows, to `destination`, in another process. Not on the chain."""
    with tf.device(program.device):
        carried = _as_bytes(program, x)
        shape = tf.shape(carried) if None in carried.shape else None
        arguments = program.begin_edge(tf.TensorSpec(carried.shape, carried.dtype), shape, program.rank, destination, label)
        _keep(program, tf.raw_ops.CollectiveBcastSendV2(input=carried, **arguments))


def edge_receive(program: RankProgram, spec: tf.TensorSpec, shape: tf.Tensor, source: int, label: str) -> tf.Tensor:
    """Receives a tensor of `spec` that `source` sends with `edge_send`; `shape` is its shape at run time."""
    with tf.device(program.device):
        carried = tf.TensorSpec(spec.shape, program.transport.byte_dtype(spec.dtype))
        arguments = program.begin_edge(carried, shape, source, program.rank, label)
        received = tf.raw_ops.CollectiveBcastRecvV2(T=carried.dtype, shape=shape, **arguments)
        _keep(program, received)
        received = tf.ensure_shape(received, spec.shape)
        return tf.bitcast(received, spec.dtype) if carried.dtype != spec.dtype else received


def _keep(program: RankProgram, message: tf.Tensor) -> None:
    """Has a sent or received `message` run although nobody may read it. See the note."""
    with tf.control_dependencies([message]):
        tf.raw_ops.AssignAddVariableOp(resource=program.communicator.edge_token(program.rank), value=tf.zeros([], tf.int64))


def _broadcast_eagerly(program: RankProgram, x: tf.Tensor, ranks: tuple[int, ...], source: int, op: str, label: str) -> tf.Tensor:
    """Returns the `x` of `source` on every one of `ranks`, in an eager run."""

    def emit(rank: RankProgram, value: tf.Tensor) -> tf.Tensor:
        if rank.rank == source:
            return broadcast_send(rank, value, ranks, op, label)
        return broadcast_receive(rank, value.shape, value.dtype, ranks, source, op, label)

    record = CollectiveRecord(op, ranks, tuple(x.shape), x.dtype.name, label, source)
    return program.together(record, (op, ranks, source), emit, x)


def _all_to_all(program: RankProgram, x: tf.Tensor, ranks: tuple[int, ...], op: str, label: str) -> tf.Tensor:
    """Sends `x[i]` to the i-th of `ranks`; what arrives is in the kernels' order."""
    x = _in_kernel_order(program, x, ranks)
    return tf.raw_ops.CollectiveAllToAllV2(
        input=x, ordering_token=[program.token()], is_stateless=False, **program.begin(op, x, ranks, label)
    )


def _reduce_scatter_in_memory(
    program: RankProgram,
    parts: Sequence[tf.Tensor],
    packed: tf.Tensor | tf.TensorSpec,
    ranks: tuple[int, ...],
    label: str,
    dtype: tf.DType,
) -> list[tf.Tensor]:
    summed_in = _summed_in(packed.dtype)
    moved = memory_collectives.reduce_scatter_parts(program, parts, packed, ranks, label, summed_in=summed_in)
    return [tf.cast(part, dtype) for part in moved]


def _summed_in(dtype: tf.DType) -> tf.DType:
    """Returns in which dtype a sum of what travelled as `dtype` is taken."""
    return tf.float32 if dtype in (tf.bfloat16, tf.float16) else dtype


def _pieces(program: RankProgram, x: tf.Tensor, elements: int | None, hops: int = 1) -> list[int]:
    """Returns how many elements go in each message of a tensor of `elements`, of which one in `hops` travels at once."""
    chunk_bytes = program.transport.chunk_bytes
    if chunk_bytes is None or elements is None:
        return [elements or 0]
    count = -(-elements * x.dtype.size // (chunk_bytes * hops))
    return [len(range(number, elements, count)) for number in range(count)]


# Note: order of a group. The kernels number the members of a group in an order of their own: devices by name, tasks as
# strings (10 before 2), GPUs by their links. A group of this mesh may be in another order, so each group finds the
# kernels' order once, by gathering its members' places, and rows are permuted locally where it differs. Workers do that when
# the strategy is made (`find_kernel_orders`): while tracing, one of them may get there when the others do not.
def find_kernel_orders(communicator: Communicator) -> None:
    """Finds the order of every group of the mesh that has a local rank. All workers call it at once."""
    for mesh_axis in MESH_AXES:
        for ranks in communicator.mesh.groups(mesh_axis):
            if len(ranks) > 1 and set(ranks) & set(communicator.local_ranks):
                communicator.kernel_orders[ranks] = [int(place) for place in _gather_places(communicator, ranks)]


def _kernel_order(program: RankProgram, ranks: tuple[int, ...]) -> list[int]:
    """Returns the places in `ranks` of the members, in the order in which the kernels number them."""
    orders = program.communicator.kernel_orders
    if ranks not in orders:
        with tf.init_scope():
            orders[ranks] = [int(place) for place in _gather_places(program.communicator, ranks)]
    return orders[ranks]


def _gather_places(communicator: Communicator, ranks: tuple[int, ...]) -> tf.Tensor:
    @tf.function(autograph=False)
    def gather() -> tf.Tensor:
        gathered = []
        for place, rank in enumerate(ranks):
            if rank not in communicator.local_ranks:
                continue
            with tf.device(communicator.mesh.devices[rank]):
                gathered.append(
                    tf.raw_ops.CollectiveGatherV2(
                        input=tf.constant([place], tf.float32),
                        ordering_token=[communicator.token(rank)],
                        group_size=len(ranks),
                        group_key=communicator.group_key(ranks),
                        instance_key=0,  # `InstanceKeys` starts higher
                        communication_hint=communicator.transport.hint,
                        timeout_seconds=communicator.transport.timeout_seconds,
                    )
                )
        return gathered[0]

    # A concrete function is never run eagerly, whatever `tf.config.run_functions_eagerly` says.
    return gather.get_concrete_function()()


def _in_kernel_order(program: RankProgram, x: tf.Tensor, ranks: tuple[int, ...]) -> tf.Tensor:
    order = _kernel_order(program, ranks)
    return x if order == sorted(order) else tf.gather(x, order)


def _inverse(order: list[int]) -> list[int]:
    return [order.index(place) for place in range(len(order))]


def _as_bytes(program: RankProgram, x: tf.Tensor) -> tf.Tensor:
    carried = program.transport.byte_dtype(x.dtype)
    return x if carried == x.dtype else tf.bitcast(x, carried)


# Note: broadcasts on the chain. The broadcast ops take no ordering token, and a send whose output nobody reads is pruned,
# so that its peer waits for ever; so does that of a receive. Reading the token before and writing it after puts them on the chain
# and keeps them alive. Messages of edges only write a token of their own.
def _chained(program: RankProgram):
    return tf.control_dependencies([tf.raw_ops.ReadVariableOp(resource=program.token(), dtype=tf.int64)])


def _extend_chain(program: RankProgram, moved: tf.Tensor) -> None:
    with tf.control_dependencies([moved]):
        tf.raw_ops.AssignAddVariableOp(resource=program.token(), value=tf.zeros([], tf.int64))
