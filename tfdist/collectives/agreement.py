"""Do all workers run the same program? Asked before a traced step runs for the first time, when it can still be told.

Within a process `CollectivePlan` compares the ranks while they are traced. Between processes the comparison goes through the
coordination service: every worker writes the sequence of collectives of its trace and reads the others'.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

from tfdist import errors
from tfdist.collectives.instance_keys import InstanceKeys
from tfdist.collectives.plan import CollectivePlan, CollectiveRecord
from tfdist.mesh import Coordination


class PlanAgreement:
    """Compares the plans of one strategy over its workers.

    Every plan is compared once: a step that is traced again with the same collectives (for a last batch of another size) asks
    nobody, because the other workers may not trace it again.

    Args:
        coordination: the workers' key-value store.
        instance_keys: the communicator's keys; they must agree too.
        timeout_seconds: how long to wait for the other workers' traces.
    """

    def __init__(self, coordination: Coordination, instance_keys: InstanceKeys, timeout_seconds: float):
        self._coordination = coordination
        self._instance_keys = instance_keys
        self._timeout_seconds = timeout_seconds
        self._known: set[str] = set()

    def check(self, plan: CollectivePlan) -> None:
        """Compares `plan` with the other workers' plans of this moment.

        Raises:
            RuntimeError: on every worker: the first entry that differs, and the workers; or, on a worker that waits in vain, who
                has traced nothing.
        """
        groups = {
            json.dumps(ranks): [self._entry(record) for record in records]
            for ranks, records in plan.sequences().items()
            if set(ranks) - set(plan.local_ranks)
        }
        text = json.dumps(groups)
        digest = hashlib.sha256(json.dumps({ranks: [e[:-1] for e in es] for ranks, es in groups.items()}).encode()).hexdigest()
        if digest in self._known:
            return
        self._known.add(digest)
        key = self._coordination.serial("plan")
        # The text before the digest: who reads a digest finds the text.
        self._coordination.put(f"{key}/text/{self._coordination.cluster.worker_index}", _packed(text))
        try:
            digests = self._coordination.exchange(f"{key}/digest", digest, self._timeout_seconds)
        except TimeoutError as error:
            raise RuntimeError(
                errors.message(
                    f"This worker, {self._coordination.cluster.task}, has traced a step with collectives that the other workers "
                    f"have not: {error}. It would wait for them in its first collective.",
                    fix="Every worker must call `fit`, `evaluate`, `predict`, `save` and the steps of a custom loop alike: look "
                    "for code that only one worker runs, such as `if is_chief: model.evaluate(...)`.",
                )
            ) from error
        for index, theirs in enumerate(digests):
            if theirs != digest:
                other = json.loads(_unpacked(self._coordination.get(f"{key}/text/{index}", self._timeout_seconds)))
                self._compare(groups, other, index)

    def _entry(self, record: CollectiveRecord) -> list[Any]:
        shape = [-1 if size is None else size for size in record.shape]
        return [record.op, shape, record.dtype, record.source, self._instance_keys.key(record), record.label]

    def _compare(self, mine: dict[str, list], theirs: dict[str, list], other: int) -> None:
        """Raises for the first difference in a group that both workers have a part in."""
        tasks = self._coordination.cluster.tasks
        here, there = self._coordination.cluster.task, tasks[other]
        for ranks in [ranks for ranks in mine if ranks in theirs] or list(mine) or list(theirs):
            own, other_entries = mine.get(ranks, []), theirs.get(ranks, [])
            place = first_difference(own, other_entries)
            if place is None:
                continue
            raise RuntimeError(
                errors.message(
                    f"Workers run different programs: collective {place} of ranks {ranks} is {_described(own, place)} on {here}, "
                    f"but {_described(other_entries, place)} on {there}. Run so, both would hang.",
                    fix="Every worker must build the same model, optimizer and step: look for code that depends on the worker, "
                    "and for different versions of the program or its settings.",
                )
            )


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


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode())).decode()


def _unpacked(text: str) -> str:
    return zlib.decompress(base64.b64decode(text)).decode()
