"""Eager runs: `strategy.run` outside any `tf.function`.

The ranks are Python threads there, of which one runs at a time. A thread that comes to a collective waits in a merge call, in
which TensorFlow stops all ranks and runs one function for them: it takes what every rank brought, runs the collective of each in
one traced function, as `CrossReplica` does for code outside replicas, and hands the results out.

    rank 0   ... all_reduce(x) | stopped                           | result ...
    rank 1                     | ... all_reduce(x) | stopped       |            result ...
    main                       |                   | both reduced  |

So eager ranks run the kernels of traced ones, over one process or several. It is meant for debugging: every collective costs a
switch of threads and a function call.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives.communicator import Communicator
from tfdist.collectives.cross_replica import CrossReplica
from tfdist.collectives.emission import Emission
from tfdist.collectives.plan import CollectivePlan, CollectiveRecord, Ranks, TensorLike
from tfdist.collectives.program import RankProgram
from tfdist.collectives.transports.transport import Transport, transport_of


@dataclasses.dataclass(eq=False)
class _Call:
    """The request of one rank, and, once `is_done`, the result: as `EagerProgram.together` says."""

    rank: int
    record: CollectiveRecord | None = None  # None when the rank's function has returned
    key: Hashable = None
    emit: Any = None
    value: tf.Tensor | None = None
    result: tf.Tensor | None = None
    is_done: bool = False


class EagerProgram(RankProgram):
    """One rank's part of one eager run. Collectives run when they are called; the plan is what has run."""

    is_eager = True

    def __init__(
        self, communicator: Communicator, rank: int, plan: CollectivePlan, cross_replica: CrossReplica, arguments: Any = ()
    ):
        self._cross_replica = cross_replica
        self._transport = _MeetingTransport(self)
        super().__init__(communicator, rank, tf.compat.v1.get_default_graph(), plan, arguments)

    def transport_of(self, ranks: Ranks) -> Transport:
        return self._transport

    def together(
        self, record: CollectiveRecord, key: Hashable, emit: Callable[[RankProgram, tf.Tensor], tf.Tensor], value: tf.Tensor
    ) -> tf.Tensor:
        """Runs a collective with the other ranks of its group: `emit` with this rank's `value`, as in `CrossReplica.call`."""
        if not tf.executing_eagerly():
            raise errors.runtime_error(
                f"{record.op} {record.label!r} was called in a `tf.function` (or in `tf.vectorized_map` and the like) within "
                "a function that `strategy.run` runs eagerly. Eager ranks meet in Python.",
                fix="Put `@tf.function` around `strategy.run`, or nowhere.",
            )
        self.settle()
        self.plan.add(self.rank, record)
        return self._wait_for(_Call(self.rank, record, key, emit, value))

    def close(self, outputs: Any) -> list[tf.Operation]:
        ended = super().close(outputs)
        if len(self.communicator.local_ranks) > 1:
            self._wait_for(_Call(self.rank))
        return ended

    def _wait_for(self, call: _Call) -> tf.Tensor:
        """Returns the result of `call`, once the other ranks have come.

        All local ranks take part in every merge call, also those that are not in the collective, or are through: they wait on.
        """
        while not call.is_done:
            tf.distribute.get_replica_context().merge_call(self._serve, args=(call,))
        return call.result

    def _serve(self, strategy: tf.distribute.Strategy, calls: _Call | tf.distribute.DistributedValues) -> None:
        calls = strategy.experimental_local_results(calls)
        waiting = [call for call in calls if call.record is not None]
        if not waiting:
            for call in calls:
                call.is_done = True
            return
        come: dict[Ranks, list[_Call]] = {}
        for call in waiting:
            come.setdefault(call.record.ranks, []).append(call)
        local_ranks = set(self.communicator.local_ranks)
        complete = [members for ranks, members in come.items() if len(members) == len(local_ranks.intersection(ranks))]
        for members in complete:
            call, given = members[0], [member.value for member in members]
            results = self._cross_replica.call(call.key, call.emit, given, call.record.ranks)
            for member, result in zip(members, results, strict=True):
                member.result, member.is_done = result, True
        if not complete:
            stuck = {call.rank: call.record for call in waiting}
            raise errors.runtime_error(
                f"Ranks wait for each other in vain: {stuck}; the others have returned.",
                fix="Every rank of a group must run the same collectives, in the same order: look for code that branches on the "
                "replica id.",
            )


class _MeetingTransport(Transport):
    """The transport of every group of an eager program: the ranks meet, and the group's own transport does the rest, traced."""

    def __init__(self, program: EagerProgram):
        self._program = program

    def _together(self, op: str, _: RankProgram, x: tf.Tensor, ranks: Ranks, label: str, *options: Any) -> tf.Tensor:
        """Runs the method `op` of the group's transport, once all members have come."""

        def emit(rank: RankProgram, value: tf.Tensor) -> tf.Tensor:
            return getattr(rank.transport_of(ranks), op)(rank, value, ranks, label, *options)

        record = CollectiveRecord(op, ranks, tuple(x.shape), x.dtype.name, label)
        return self._program.together(record, (op, ranks, label, options), emit, x)

    all_reduce: Any = functools.partialmethod(_together, "all_reduce")
    all_gather: Any = functools.partialmethod(_together, "all_gather")
    all_to_all: Any = functools.partialmethod(_together, "all_to_all")
    reduce_scatter: Any = functools.partialmethod(_together, "reduce_scatter")

    def broadcast(self, program: Emission, x: TensorLike, ranks: Ranks, source: int, op: str, label: str) -> tf.Tensor:
        def emit(rank: RankProgram, value: tf.Tensor) -> tf.Tensor:
            mine = value if rank.rank == source else tf.TensorSpec(value.shape, value.dtype)
            return transport_of(rank, ranks).broadcast(rank, mine, ranks, source, op, label)

        is_summed = program.communicator.transport_of(ranks).sums_to_move
        record = CollectiveRecord(op, ranks, tuple(x.shape), x.dtype.name, label, source, is_summed)
        value = x if program.rank == source else tf.zeros(x.shape, x.dtype)
        return self._program.together(record, (op, ranks, source), emit, value)
