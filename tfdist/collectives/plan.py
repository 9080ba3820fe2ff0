"""The sequence of collectives that a traced step runs, as data."""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist import errors
from tfdist.collectives.circles import Ranks, ranks_in_circles

TensorLike: TypeAlias = tf.Tensor | tf.TensorSpec  # a tensor, or the shape and dtype of one that is elsewhere
ONE_ORDER = "Ranks that are in several groups together must run the groups' collectives in one order."  # what mends a circle


@dataclasses.dataclass(frozen=True)
class CollectiveRecord:
    """One collective of one rank.

    Attributes:
        op: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", or "message", which is one between
            two ranks (see `point_to_point`).
        ranks: the members of the group, in group order; of a message, source and destination.
        shape: static shape of this rank's input; None where a dimension is known at run time only.
        dtype: dtype name on the wire.
        label: what it is for, in the words of the code ("unshard/dense", "reduce_scatter/bucket_0").
        source: the rank that sends, of "broadcast", "send" and "message".
        is_summed: whether it travels as an all-reduce, to which all but the source give zeros.
    """

    op: str
    ranks: Ranks
    shape: tuple[int | None, ...]
    dtype: str
    label: str = ""
    source: int | None = None
    is_summed: bool = False

    @property
    def input_bytes(self) -> int:
        """Bytes of this rank's input. Raises ValueError when the shape is known at run time only."""
        sizes = [size for size in self.shape if size is not None]
        if len(sizes) < len(self.shape):
            raise errors.value_error("The bytes of a collective need a static shape.", record=self)
        return math.prod(sizes) * tf.as_dtype(self.dtype).size

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends, S = `input_bytes`, N ranks (ring algorithms; Rabenseifner, Patarasuk and Yuan):

        all_reduce 2S(N-1)/N, all_gather S(N-1), reduce_scatter and all_to_all S(N-1)/N, broadcast, send and message S, or what
        an all-reduce takes where they are summed.
        """
        n = len(self.ranks)
        part = (n - 1) / n
        factors = {"all_reduce": 2 * part, "all_gather": n - 1, "reduce_scatter": part, "all_to_all": part}
        factors |= dict.fromkeys(("broadcast", "send", "message"), 1)
        return factors["all_reduce" if self.is_summed else self.op] * self.input_bytes

    @property
    def kind(self) -> tuple[Any, ...]:
        """Two collectives of a group with one kind are interchangeable on the wire."""
        # Messages run side by side, and their labels tell which is which.
        own = (self.label,) if self.op == "message" else ()
        return (self.op, self.ranks, self.shape, self.dtype, self.source, *own)

    @property
    def signature(self) -> tuple[Any, ...]:
        """All members of the group in one process must agree on it."""
        return (*self.kind, self.label)

    @property
    def name(self) -> str:
        """Its name in errors."""
        return f"{self.op} {self.label!r} of {list(self.ranks)}"


class CollectivePlan:
    """The collectives of one trace of `strategy.run`, per rank, in program order.

    While the ranks are traced, the i-th collective of a group must be the same for every member, whichever is traced first. So a
    program in which two ranks disagree is refused while it is traced, before it can hang. Ranks of other workers are traced
    elsewhere; `PlanAgreement` compares with them.

    Args:
        world_size: number of ranks.
        local_ranks: the ranks that this process traces; None: all of them.
        hosts: the number of each rank's host; empty: all are on one.

    Attributes:
        records: the collectives of each rank.
        notes: what else all ranks must agree on, in words.
        steps: the steps that each rank's optimizers take, as lists that print (`tfdist.optimizers.plan`).
        name: that of the program, the same on all workers that run it; "": it has none.
        gradients: where gradients are compressed, by which compressor that of each variable travels, per rank and by name.
        parameters: where parameters are compressed, by which compressor each travels, per rank and by name.
    """

    def __init__(self, world_size: int, local_ranks: Iterable[int] | None = None, hosts: Sequence[int] = ()):
        self.hosts = tuple(hosts) or (0,) * world_size
        self.local_ranks = tuple(range(world_size) if local_ranks is None else local_ranks)
        self.records: list[list[CollectiveRecord]] = [[] for _ in range(world_size)]
        self.notes: list[str] = []
        self.steps: list[list[Any]] = [[] for _ in range(world_size)]
        self.name = ""
        self.gradients: list[dict[str, Any]] = [{} for _ in range(world_size)]
        self.parameters: list[dict[str, Any]] = [{} for _ in range(world_size)]
        self._agreed: dict[Ranks, list[CollectiveRecord]] = collections.defaultdict(list)
        self._position: collections.Counter[tuple[int, tuple[int, ...]]] = collections.Counter()
        self._of_kind: collections.Counter[tuple[int, tuple[Any, ...]]] = collections.Counter()
        self._shared: dict[Callable[..., Any], Any] = {}

    def shared(self, kind: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the one `kind(*arguments)` that all local ranks of this trace share, made on first use.

        It may have a `check_complete`, too.
        """
        if kind not in self._shared:
            self._shared[kind] = kind(*arguments)
        return self._shared[kind]

    def add(self, rank: int, record: CollectiveRecord) -> int:
        """Appends `record` to `rank`'s program; returns how many of its kind were there before.

        Raises:
            RuntimeError: another rank of the group runs something else at this place.
        """
        agreed = self._agreed[record.ranks]
        index = self._position[rank, record.ranks]
        self._position[rank, record.ranks] += 1
        if index == len(agreed):
            agreed.append(record)
        expected = agreed[index]
        if expected.signature != record.signature:
            raise errors.runtime_error(
                f"Ranks disagree on collective {index} of group {list(record.ranks)}: rank {rank} runs {record}, but a "
                f"rank traced before it runs {expected}.",
                fix="Every rank of a group must run the same collectives, on the same shapes, in the same order: look "
                "for code that branches on the replica id, or pass `uneven=True` where the sizes differ by rank.",
            )
        self.records[rank].append(record)
        self._of_kind[rank, record.kind] += 1
        return self._of_kind[rank, record.kind] - 1

    def add_message(self, rank: int, record: CollectiveRecord) -> None:
        """Appends a message between two ranks to `rank`'s program; messages have no order."""
        self.records[rank].append(record)

    def note(self, rank: int, text: str) -> None:
        """Notes something that no collective shows and in which workers must agree; the first local rank speaks for all."""
        if rank == self.local_ranks[0]:
            self.notes.append(text)

    def partners(self) -> list[int]:
        """Returns the ranks that are in a collective with a local rank."""
        return sorted({other for rank in self.local_ranks for record in self.records[rank] for other in record.ranks})

    def sequences(self) -> dict[Ranks, list[CollectiveRecord]]:
        """Returns, per group of the local ranks, its collectives in order."""
        return dict(self._agreed)

    def check_complete(self) -> None:
        """Raises RuntimeError when ranks would wait for ever: for one that ran fewer collectives, or for each other."""
        for one in self._shared.values():
            if hasattr(one, "check_complete"):
                one.check_complete()
        self._shared.clear()  # they may hold tensors, and with them the graph, of a trace whose plan is kept
        for ranks, agreed in self._agreed.items():
            counts = {rank: self._position[rank, ranks] for rank in ranks if rank in self.local_ranks}
            if set(counts.values()) != {len(agreed)}:
                shortest = min(counts, key=lambda rank: counts[rank])
                raise errors.runtime_error(
                    f"Ranks of group {list(ranks)} run different numbers of collectives: {counts}. Rank {shortest} lacks "
                    f"{agreed[counts[shortest]]}.",
                    fix="Every rank of a group must run the same collectives: look for code that branches on the replica id.",
                )
        chains = self.chains()
        waiting = ranks_in_circles({rank: [one.ranks for one in chain] for rank, chain in chains.items()})
        if waiting:
            places = ", ".join(f"rank {rank} in {chains[rank][place].name}" for rank, place in waiting.items())
            raise errors.runtime_error(f"Ranks would wait for each other for ever: {places}.", fix=ONE_ORDER)

    def chains(self) -> dict[int, list[CollectiveRecord]]:
        """Returns, per local rank, its collectives that begin one after the other: all but messages that have no order."""
        return {rank: [one for one in self.records[rank] if one.op != "message"] for rank in self.local_ranks}

    def __str__(self) -> str:
        """The first local rank's program, in words."""
        records = self.records[self.local_ranks[0]]
        counts = ", ".join(f"{number} {op}" for op, number in self.counts().items())
        return f"a program of {counts} that begins with {records[0].op} {records[0].label!r}" if records else "an empty program"

    def counts(self, rank: int | None = None) -> dict[str, int]:
        """Returns how often each operation occurs in the program of `rank`, a local one; None: the first."""
        rank = self.local_ranks[0] if rank is None else rank
        return dict(collections.Counter(record.op for record in self.records[rank]))

    def sent_bytes(self, rank: int | None = None, *, between_hosts: bool = False) -> float:
        """Returns the bytes that `rank`, a local one (None: the first), sends in a step; receiving is not sending.

        With `between_hosts` those of groups whose members are on several hosts only: what a rank sends to another host, of a ring
        over all of them a rank whose neighbour is on another host. Where no host is known to be another one they are 0.
        """
        rank = self.local_ranks[0] if rank is None else rank
        sent = [record for record in self.records[rank] if record.is_summed or record.source in (None, rank)]
        if between_hosts:
            sent = [record for record in sent if len({self.hosts[member] for member in record.ranks}) > 1]
        return sum(record.sent_bytes for record in sent)
