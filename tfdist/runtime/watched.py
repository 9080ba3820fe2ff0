"""One strategy as the failure watch sees it: what its ranks run, and where it meets the other workers.

Note: points in another order.
All workers come to the same points, programs of collectives and meetings, in the same order. So this cannot go on, however long
one waits:

    worker 0    ..., step 7 for the 5th time, meeting 3                              a callback of its own saves
    worker 1    ..., step 7 for the 5th time, step 7 for the 6th time                it trains on

Worker 0 has come to meeting 3 before its 6th step 7, worker 1 the other way round: each waits for the other. A worker that is
merely slow has completed no fewer steps than the one that waits at a later point has.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tfdist.runtime.coordination import Coordination
from tfdist.runtime.peers import Word

# A program has run for so long before its point is compared with others'.
APART_SECONDS = 4.0


class Program(Protocol):
    """A program of collectives; `str` describes it. `name` is the same on all workers, "" for one that has none."""

    name: str

    def partners(self) -> list[int]:
        """Returns the ranks that are in a collective with a local rank."""


class Progress(Protocol):
    """How far the ranks of this process are."""

    def running(self) -> Mapping[int, tuple[int, Any]]:
        """Returns, per local rank that is in a program: a count, which is another for its next program, and the program."""

    def completed(self) -> dict[str, int]:
        """Returns how often all local ranks have come to the end of each program that has a name."""


class Watched:
    """A strategy. For the thread of the failure watch.

    Args:
        progress: of its ranks.
        meetings: where it meets the other workers.
        step_timeout_seconds: how long a collective may wait for others.
        ranks_per_worker: how many ranks a worker has.
    """

    def __init__(self, progress: Progress, meetings: Coordination, step_timeout_seconds: float, ranks_per_worker: int):
        self._step_timeout = step_timeout_seconds
        self._progress, self._meetings = progress, meetings
        self._each = ranks_per_worker
        self._since: dict[int, tuple[int, float, Any]] = {}

    def waiting(self, is_running: bool) -> list[tuple[float, float, Any]]:
        """Returns, per local rank in a program: for how many seconds it has been in it, how many it may be, and the program.

        A step that ended with an error, as when its data have run out, may have noted its beginning and no end: with
        `is_running=False` no rank is taken to be in one.
        """
        now, found = time.monotonic(), {}
        for rank, (count, program) in self._progress.running().items() if is_running else ():
            before, since, _ = self._since.get(rank, (None, now, None))
            found[rank] = (count, since if before == count else now, program)
        self._since = found
        return [(now - since, self._step_timeout, program) for _, since, program in found.values()]

    def point(self) -> Word | None:
        """Returns the point at which this worker waits for others, as they need it to compare; None where it does not."""
        if self._meetings.waits_at:
            at = f"at a point where all workers must meet, {self._meetings.waits_at}"
            return {"at": at, "meetings": self._meetings.meetings, "completed": self._progress.completed()}
        now = time.monotonic()
        found = [program for _, since, program in self._since.values() if now - since > APART_SECONDS and program.name]
        if not found or not self._is_in(found[0]):
            return None
        # What is completed is read between two looks at what runs.
        point = {"at": f"in {found[0]}", "program": found[0].name, "with": found[0].partners()}
        point["completed"] = self._progress.completed()
        return point if self._is_in(found[0]) else None

    def never_comes(self, point: Word, other: int, program: Program) -> bool:
        """Whether worker `other`, which waits at `point`, never comes to `program`, in which this worker is.

        Note: points in another order. What is counted is read in the order that errs on the safe side, beside running steps.
        """
        here = self._meetings.cluster.worker_index
        theirs, own = (range(index * self._each, (index + 1) * self._each) for index in (other, here))
        if not program.name or not set(theirs) & set(program.partners()):
            return False
        completed = self._progress.completed()
        if not self._is_in(program) or point["completed"].get(program.name, 0) > completed.get(program.name, 0):
            return False
        if "meetings" in point:
            return self._meetings.meetings < point["meetings"]
        has_been_there = completed.get(point["program"], 0) > point["completed"].get(point["program"], 0)
        return point["program"] != program.name and not has_been_there and bool(set(own) & set(point["with"]))

    def _is_in(self, program: Program) -> bool:
        return any(running is program for _, running in self._progress.running().values())


# Of several strategies, each of which has the same number on all workers.


def point_of(watched: Sequence[Watched]) -> tuple[int, Word] | None:
    """Returns the point at which this worker waits for others, after the number of the strategy; None where it does not."""
    return next(((number, point) for number, one in enumerate(watched) if (point := one.point())), None)


def who_never_comes(watched: Sequence[Watched], beats: Mapping[int, Word], program: Program) -> tuple[int | None, str]:
    """Returns the worker that never comes to `program`, and the words for the point at which it waits; (None, "") if all come.

    Args:
        beats: what the other workers have said of themselves, by their index; "point" is their `point_of`.
    """
    nowhere: tuple[int, Word] = (len(watched), {})
    for index, beat in beats.items():
        number, point = beat.get("point") or nowhere
        if number < len(watched) and watched[number].never_comes(point, index, program):
            return index, point["at"]
    return None, ""
