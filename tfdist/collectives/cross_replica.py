"""Collectives of all ranks at once, from code that runs outside replicas: reading a variable, reducing a metric, saving.

With several workers such code runs on every worker, and each must reach it in the same order. Eagerly or in a graph.
"""

import functools
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import activations, group_ops, ops
from tfdist.collectives.communicator import Communicator
from tfdist.collectives.program import RankProgram
from tfdist.collectives.transports.kernel_settings import WIDENED
from tfdist.mesh import MESH_AXES

Emit = Callable[[RankProgram, tf.Tensor], tf.Tensor]

# Dtypes that no collective carries, and those of the same width in which they travel.
_SAME_BITS = {tf.uint32: tf.int32, tf.uint64: tf.int64}


class CrossReplica:
    """The collectives of one communicator for cross-replica code.

    Every method takes and returns one tensor per local rank, in rank order.
    """

    def __init__(self, communicator: Communicator):
        self._communicator = communicator
        self._functions: dict[Hashable, Any] = {}

    @property
    def is_multi_worker(self) -> bool:
        """Whether there are ranks in other processes; else all values are here and nothing needs a collective."""
        return self._communicator.is_multi_worker

    def all_reduce(self, values: Sequence[tf.Tensor], reduce_op: str, label: str = "reduce") -> list[tf.Tensor]:
        """Reduces ("sum", "mean", "max", "min") over the data axis; of the ranks along "pipe" the last one's values count."""

        def emit(program: RankProgram, value: tf.Tensor) -> tf.Tensor:
            ranks = program.group_ranks("data")
            reduced = group_ops.all_reduce(program, value, ranks, "sum" if reduce_op == "mean" else reduce_op, label)
            reduced = reduced / tf.cast(len(ranks), value.dtype) if reduce_op == "mean" else reduced
            return _of_last_pipe_rank(program, reduced, label)

        return self.call(("all_reduce", reduce_op, label), emit, values)

    def all_gather(self, values: Sequence[tf.Tensor], axis: int = 0, label: str = "gather") -> list[tf.Tensor]:
        """Concatenates over the data axis, in rank order, along `axis`, which may differ in length.

        Of the ranks along the axis "pipe" the last one's values count; the others' have the same shapes.
        """

        def emit(program: RankProgram, value: tf.Tensor) -> tf.Tensor:
            axes = list(range(value.shape.rank))
            axes[0], axes[axis] = axes[axis], axes[0]
            swapped = tf.transpose(value, axes) if axis else value
            swapped = _of_last_pipe_rank(program, swapped, label)
            gathered = ops.all_gather_uneven(program, swapped, program.group_ranks("data"), label)
            return tf.transpose(gathered, axes) if axis else gathered

        return self.call(("all_gather", axis, label), emit, values)

    def of_all_ranks(self, values: Sequence[tf.Tensor], label: str = "ranks") -> list[tf.Tensor]:
        """Stacks the values of all ranks, along every axis of the mesh, in rank order: (world_size, ...)."""

        def emit(program: RankProgram, value: tf.Tensor) -> tf.Tensor:
            stacked = value[tf.newaxis]
            for mesh_axis in reversed(MESH_AXES):  # the innermost first: ranks are numbered so
                stacked = group_ops.all_gather(program, stacked, program.group_ranks(mesh_axis), label)
            return stacked

        return self.call(("of_all_ranks", label), emit, values)

    def sum_over_workers(self, value: tf.Tensor, label: str = "reduce/workers") -> tf.Tensor:
        """Sums one `value` per worker over the workers; returns it on this one."""
        members = self._communicator.first_ranks
        emit = functools.partial(group_ops.all_reduce, ranks=members, reduce_op="sum", label=label)
        return self.call(("workers", label), emit, [value], members)[0]

    def from_chief(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the first worker's `value` on every worker; the others give one of the same shape and dtype."""
        members = self._communicator.first_ranks

        def emit(program: RankProgram, value: tf.Tensor) -> tf.Tensor:
            return group_ops.broadcast(program, value, value.shape, members, members[0], "broadcast/chief")

        return self.call("from_chief", emit, [value], members)[0]

    def from_first_owner(self, value: tf.Tensor, pipe_ranks: Sequence[int]) -> tf.Tensor:
        """Returns the `value` of the first of the ranks at the coordinates `pipe_ranks` of "pipe", on every worker that has one.

        Workers that have none do not call it; the others give a value of the same shape and dtype.
        """
        mesh = self._communicator.mesh
        each = len(self._communicator.local_ranks)
        owners = [rank for rank, coordinate in enumerate(mesh.coordinates()) if coordinate.pipe in pipe_ranks]
        firsts = list({rank // each: rank for rank in reversed(owners)}.values())[::-1]  # of every worker

        def emit(program: RankProgram, value: tf.Tensor) -> tf.Tensor:
            for receiver in firsts[1:]:
                pair = (firsts[0], receiver)
                if program.rank in pair:
                    value = group_ops.broadcast(program, value, value.shape, pair, firsts[0], "broadcast/owner")
            return value

        return self.call(("from_first_owner", tuple(firsts)), emit, [value], firsts)[0]

    def call(
        self, key: Hashable, emit: Emit, values: Sequence[tf.Tensor], members: Sequence[int] | None = None
    ) -> list[tf.Tensor]:
        """Runs `emit(program, value)` for every local rank (of `members`, if given), which has one of `values`, all at once.

        `key` is the same on all workers, and tells apart what `emit` does: eagerly, calls with one key share traced functions,
        one per shape; workers know the program by it.
        """
        if not tf.executing_eagerly():
            return self._emit(emit, values, members, key)
        # Concrete functions, because TensorFlow warns of a function that is traced for many shapes.
        specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
        kind = (key, *((tuple(spec.shape), spec.dtype) for spec in specs))
        if kind not in self._functions:
            traced = tf.function(lambda *values: self._emit(emit, values, members, key), autograph=False)
            self._functions[kind] = traced.get_concrete_function(*specs)
        return self._functions[kind](*values)

    def _emit(self, emit: Emit, values: Sequence[tf.Tensor], members: Sequence[int] | None, key: Hashable) -> list[tf.Tensor]:
        communicator = self._communicator
        ranks = [rank for rank in communicator.local_ranks if members is None or rank in members]
        plan = communicator.new_plan(f"cross-replica {zlib.crc32(repr(key).encode())}")
        if members is None or tuple(members) == communicator.first_ranks:
            communicator.turn_at_calls(plan)
        results = []
        for rank, value in zip(ranks, values, strict=True):
            program = RankProgram(communicator, rank, tf.compat.v1.get_default_graph(), plan, [value])
            with tf.device(program.device):
                result = _carried(emit, program, value)
                ended = program.close(result)
                if ended:  # code outside replicas may stop the graph: when no worker has data any more
                    with tf.control_dependencies(ended):
                        result = tf.identity(result)
                results.append(result)
        plan.check_complete()
        return results


def _of_last_pipe_rank(program: RankProgram, value: tf.Tensor, label: str) -> tf.Tensor:
    """Returns the `value` of the last rank of this rank's group along "pipe", where outputs, losses and metrics are."""
    ranks = program.group_ranks("pipe")
    if len(ranks) == 1:
        return value
    mine = value if program.rank == ranks[-1] else tf.zeros_like(value)
    return activations.all_reduce(program, mine, "pipe", f"{label}/pipe")


def _carried(emit: Emit, program: RankProgram, value: tf.Tensor) -> tf.Tensor:
    """Runs `emit` in a dtype that collectives carry, and returns the result in the value's own."""
    dtype = value.dtype
    if dtype in _SAME_BITS:
        return tf.bitcast(emit(program, tf.bitcast(value, _SAME_BITS[dtype])), dtype)
    if dtype in WIDENED:
        return tf.cast(emit(program, tf.cast(value, WIDENED[dtype])), dtype)
    group_ops.check_dtype("a collective between workers", value)
    return emit(program, value)


def cross_replica_of(strategy: tf.distribute.Strategy) -> CrossReplica | None:
    """Returns the cross-replica collectives of a tfdist strategy, None for every other strategy.

    The protocol by which variables find them: a tfdist strategy's `extended` has an attribute `cross_replica`.
    """
    found = getattr(strategy.extended, "cross_replica", None)
    return found if isinstance(found, CrossReplica) else None
