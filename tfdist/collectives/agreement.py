"""Do all workers run the same program? Asked before a traced step runs for the first time, while an error can still be raised.

Within a process `CollectivePlan` compares the ranks while they are traced. Between processes the comparison goes through the
coordination service: every worker writes the sequence of collectives of its trace and reads the others'.
"""

import base64
import collections
import dataclasses
import hashlib
import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.collectives.circles import Ranks, ranks_in_circles
from tfdist.collectives.instance_keys import InstanceKeys
from tfdist.collectives.plan import ONE_ORDER, CollectivePlan, CollectiveRecord
from tfdist.runtime import Coordination

Chains = Mapping[int, Sequence[Ranks]]  # by rank, the groups of its collectives, in order


@dataclasses.dataclass(eq=False)
class PlanAgreement:
    """Compares the plans of one strategy over its workers, and finds ranks that would wait for each other (see `circles`).

    Every plan is compared once: a step that is traced again with the same collectives (for a last batch of another size) asks
    nobody, because the other workers may not trace it again. Collectives of groups within a worker may differ then: they are
    looked at beside what the others have written the first time. The communicator's `instance_keys` must agree, too.
    """

    coordination: Coordination
    instance_keys: InstanceKeys
    timeout_seconds: float
    ranks_per_worker: int
    # By the digest of what is compared: its place, the same on all workers, and the other workers' chains.
    _known: dict[str, tuple[int, Chains]] = dataclasses.field(default_factory=dict, init=False)

    def check(self, plan: CollectivePlan) -> None:
        """Compares `plan` with the other workers' plans of this moment.

        Raises:
            RuntimeError: on every worker: the first entry that differs, and the workers; or the ranks that would wait for each
                other; or, on a worker that waits in vain, who has not come.
        """
        shared = {ranks: records for ranks, records in plan.sequences().items() if set(ranks) - set(plan.local_ranks)}
        groups = {json.dumps(ranks): list(map(self._entry, records)) for ranks, records in shared.items()}
        chains = {rank: [one.ranks for one in chain] for rank, chain in plan.chains().items()}
        # Workers of different groups differ in these; only what concerns a common group is compared.
        essence = {ranks: [entry[:-1] for entry in entries] for ranks, entries in groups.items()}
        orders = _numbered([[ranks for ranks in chain if ranks in shared] for chain in chains.values()])
        digest = _digest([essence, plan.notes, orders])
        place, others = self._known.get(digest, (1 + len(self._known), None))
        plan.name = f"step {place}"
        if others is None:
            others = self._exchanged(place, digest, groups, plan.notes, list(chains.values()))
            self._known[digest] = place, others
        if others:
            self._look_for_circles(plan, {**others, **chains})

    def _exchanged(
        self, place: int, digest: str, groups: dict[str, Any], notes: list[str], chains: Sequence[Sequence[Ranks]]
    ) -> Chains:
        """Tells the others what this worker runs, compares it with what they run, and returns their chains.

        Of workers that run the same one is enough: in the others the same stands before the same.
        """
        here = self.coordination.cluster.worker_index
        names, numbers = _numbered(chains)
        # Workers that share all other groups differ by the ranks in groups of their own.
        first = here * self.ranks_per_worker
        alike = [ranks if json.dumps(ranks) in groups else ["own", *(rank - first for rank in ranks)] for ranks in names]
        mine = _digest([digest, alike, numbers])
        # Before the digest: who reads a digest finds the text.
        packed = base64.b64encode(zlib.compress(json.dumps([groups, notes, names, numbers]).encode())).decode()
        self.coordination.put(f"plan/{place}/{here}", packed)
        digests = self.coordination.meet("a training, test or predict step", mine, self.timeout_seconds)
        others: dict[int, list[Ranks]] = {}
        for theirs in dict.fromkeys(digests):
            if theirs != mine:
                index = digests.index(theirs)
                text = self.coordination.get(f"plan/{place}/{index}", self.timeout_seconds)
                their_groups, their_notes, their_names, their_numbers = json.loads(zlib.decompress(base64.b64decode(text)))
                self._compare([groups, notes], [their_groups, their_notes], index)
                their_names = [tuple(ranks) for ranks in their_names]
                for rank, chain in enumerate(their_numbers, index * self.ranks_per_worker):
                    others[rank] = [their_names[number] for number in chain]
        return others

    def _look_for_circles(self, plan: CollectivePlan, chains: Chains) -> None:
        counts = {rank: collections.Counter(chain) for rank, chain in chains.items()}
        for ranks in {ranks for count in counts.values() for ranks in count}:
            if len({counts[rank][ranks] for rank in ranks if rank in counts}) > 1:
                return  # two others run different programs, and will say so
        waiting = ranks_in_circles(chains)
        if not waiting:
            return
        mine, tasks = plan.chains(), self.coordination.cluster.tasks
        places = ", ".join(
            f"rank {rank} ({tasks[rank // self.ranks_per_worker]}) in "
            + (mine[rank][place].name if rank in mine else f"one of {list(chains[rank][place])}")
            for rank, place in sorted(waiting.items())
        )
        self.coordination.fail(f"Ranks would wait for each other for ever: {places}.", fix=ONE_ORDER)

    def _entry(self, record: CollectiveRecord) -> list[Any]:
        shape = [-1 if size is None else size for size in record.shape]
        return [record.op, shape, record.dtype, record.source, self.instance_keys.key(record), record.label]

    def _compare(self, mine: list[Any], theirs: list[Any], other: int) -> None:
        """Raises for the first difference in a group that both workers have a part in, or in the notes."""
        (groups, notes), (other_groups, other_notes) = mine, theirs
        here, there = self.coordination.cluster.task, self.coordination.cluster.tasks[other]
        for ranks in dict.fromkeys([*groups, *other_groups]):
            own, others = groups.get(ranks, []), other_groups.get(ranks, [])
            workers = {rank // self.ranks_per_worker for rank in json.loads(ranks)}
            if not {self.coordination.cluster.worker_index, other} <= workers:
                continue
            place = first_difference(own, others)
            if place is not None:
                self.coordination.fail(
                    f"Workers run different programs: collective {place} of ranks {ranks} is {_described(own, place)} on {here}, "
                    f"but {_described(others, place)} on {there}. Run so, both would hang."
                )
        for note, other_note in itertools.zip_longest(notes, other_notes, fillvalue="missing"):
            if note != other_note:
                self.coordination.fail(f"Workers run different programs: {note} on {here}, but {other_note} on {there}.")


def first_difference(mine: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> int | None:
    """Returns the first place at which two sequences of entries differ (labels, which come last, do not count), or None."""
    pairs = enumerate(itertools.zip_longest(mine, theirs, fillvalue=()))
    return next((place for place, (one, other) in pairs if list(one[:-1]) != list(other[:-1])), None)


def _described(entries: Sequence[Sequence[Any]], place: int) -> str:
    if place >= len(entries):
        return f"missing (there are {len(entries)})"
    op, shape, dtype, _, key, label = entries[place]
    return f"{op} {label!r} of {dtype}{shape} (key {key})"


def _numbered(chains: Sequence[Sequence[Ranks]]) -> tuple[list[Ranks], list[list[int]]]:
    """Returns the groups of `chains`, and each chain as their numbers: what is short to send."""
    numbers = {ranks: number for number, ranks in enumerate(dict.fromkeys(itertools.chain(*chains)))}
    return list(numbers), [[numbers[ranks] for ranks in chain] for chain in chains]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
