"""Do all workers run the same program? Asked before a traced step runs for the first time, when it can still be told.

Within a process `CollectivePlan` compares the ranks while they are traced. Between processes the comparison goes through the
coordination service: every worker writes the sequence of collectives of its trace and reads the others'.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import zlib
from collections.abc import Sequence
from typing import Any

from tfdist.collectives.instance_keys import InstanceKeys
from tfdist.collectives.plan import CollectivePlan, CollectiveRecord
from tfdist.runtime import Coordination


class PlanAgreement:
    """Compares the plans of one strategy over its workers.

    Every plan is compared once: a step that is traced again with the same collectives (for a last batch of another size) asks
    nobody, because the other workers may not trace it again. The communicator's `instance_keys` must agree, too.
    """

    def __init__(
        self, coordination: Coordination, instance_keys: InstanceKeys, timeout_seconds: float, ranks_per_worker: int = 1
    ):
        self._coordination = coordination
        self._instance_keys = instance_keys
        self._timeout_seconds = timeout_seconds
        self._ranks_per_worker = ranks_per_worker
        self._known: dict[str, int] = {}  # the place of each digest, the same on all workers

    def check(self, plan: CollectivePlan) -> None:
        """Compares `plan` with the other workers' plans of this moment.

        Raises:
            RuntimeError: on every worker: the first entry that differs, and the workers; or, on a worker that waits in vain, who
                has not come.
        """
        groups = {
            json.dumps(ranks): [self._entry(record) for record in records]
            for ranks, records in plan.sequences().items()
            if set(ranks) - set(plan.local_ranks)
        }
        # Workers of different groups differ in these; only what concerns a common group is compared.
        essence = {ranks: [entry[:-1] for entry in entries] for ranks, entries in groups.items()}
        digest = hashlib.sha256(json.dumps([essence, plan.notes]).encode()).hexdigest()
        is_known = digest in self._known
        place = self._known.setdefault(digest, 1 + len(self._known))
        plan.name = f"step {place}"
        if is_known:
            return
        # Before the digest: who reads a digest finds the text.
        self._coordination.put(f"plan/{place}/{self._coordination.cluster.worker_index}", _packed([groups, plan.notes]))
        digests = self._coordination.meet("a training, test or predict step", digest, self._timeout_seconds)
        for index, theirs in enumerate(digests):
            if theirs != digest:
                text = self._coordination.get(f"plan/{place}/{index}", self._timeout_seconds)
                self._compare([groups, plan.notes], _unpacked(text), index)

    def _entry(self, record: CollectiveRecord) -> list[Any]:
        shape = [-1 if size is None else size for size in record.shape]
        return [record.op, shape, record.dtype, record.source, self._instance_keys.key(record), record.label]

    def _compare(self, mine: list[Any], theirs: list[Any], other: int) -> None:
        """Raises for the first difference in a group that both workers have a part in, or in the notes."""
        (groups, notes), (other_groups, other_notes) = mine, theirs
        here, there = self._coordination.cluster.task, self._coordination.cluster.tasks[other]
        for ranks in dict.fromkeys([*groups, *other_groups]):
            own, others = groups.get(ranks, []), other_groups.get(ranks, [])
            workers = {rank // self._ranks_per_worker for rank in json.loads(ranks)}
            if not {self._coordination.cluster.worker_index, other} <= workers:
                continue
            place = first_difference(own, others)
            if place is not None:
                self._coordination.fail(
                    f"Workers run different programs: collective {place} of ranks {ranks} is {_described(own, place)} on {here}, "
                    f"but {_described(others, place)} on {there}. Run so, both would hang."
                )
        for note, other_note in itertools.zip_longest(notes, other_notes, fillvalue="missing"):
            if note != other_note:
                self._coordination.fail(f"Workers run different programs: {note} on {here}, but {other_note} on {there}.")


def first_difference(mine: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> int | None:
    """Returns the first place at which two sequences of entries differ (labels, which come last, do not count), or None."""
    for place, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if list(one[:-1]) != list(other[:-1]):
            return place
    return None if len(mine) == len(theirs) else min(len(mine), len(theirs))


def _described(entries: Sequence[Sequence[Any]], place: int) -> str:
    if place >= len(entries):
        return f"missing (there are {len(entries)})"
    op, shape, dtype, _, key, label = entries[place]
    return f"{op} {label!r} of {dtype}{shape} (key {key})"


def _packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def _unpacked(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))
