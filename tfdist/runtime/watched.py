"""One strategy as the failure watch sees it: what its ranks run, and where it meets the other workers.

Note: points in another order.
All workers come to the same programs and meetings in the same order. So this cannot go on, however long one waits:

    worker 0    ..., step 7 for the 5th time, meeting 3                              a callback of its own saves
    worker 1    ..., step 7 for the 5th time, step 7 for the 6th time                it trains on

Worker 0 has come to meeting 3 before its 6th step 7, worker 1 the other way round: each waits for the other. A worker that is
merely slow has completed no fewer steps than the one that waits in a meeting has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tfdist.runtime.coordination import Coordination
from tfdist.runtime.peers import Word


class Program(Protocol):
    """A program of collectives; `str` describes it. `name` is the same on all workers, "" for one that has none."""

    name: str

    def concerns(self, ranks: Any) -> bool:
        """Whether a local rank communicates with one of `ranks` in it."""


class Progress(Protocol):
    """How far the ranks of this process are."""

    def running(self) -> Mapping[int, tuple[int, Any]]:
        """Returns, per local rank that is in a program: a count, which is another for its next program, and the program."""

    def completed(self) -> dict[str, int]:
        """Returns how often the first local rank has come to the end of each program that has a name."""


@dataclasses.dataclass(frozen=True)
class Watched:
    """A strategy.

    Attributes:
        progress: of its ranks.
        meetings: where it meets the other workers; None: nowhere.
        step_timeout_seconds: how long a collective may wait for others.
        ranks_per_worker: how many ranks a worker has.
    """

    progress: Progress
    meetings: Coordination | None
    step_timeout_seconds: float
    ranks_per_worker: int = 1

    def meeting(self) -> Word | None:
        """Returns where this worker waits in a meeting, for the others; None where it does not."""
        at = self.meetings.waits_at if self.meetings else ""
        return {"at": at, "number": self.meetings.meetings, "completed": self.progress.completed()} if at else None

    def never_comes(self, meeting: Word, other: int, program: Program) -> bool:
        """Whether worker `other`, which waits in `meeting`, never comes to `program`, in which this worker is.

        Note: points in another order. What is counted is read in the order that errs on the safe side, beside running steps.
        """
        first = other * self.ranks_per_worker
        if self.meetings is None or not program.name or not program.concerns(range(first, first + self.ranks_per_worker)):
            return False
        completed = self.progress.completed().get(program.name, 0)
        is_in_it = any(running is program for _, running in self.progress.running().values())
        return is_in_it and self.meetings.meetings < meeting["number"] and meeting["completed"].get(program.name, 0) <= completed


# Of several strategies, each of which has the same number on all workers.


def meeting_of(watched: Sequence[Watched]) -> tuple[int, Word] | None:
    """Returns in which meeting this worker waits for others, behind the number of the strategy; None where it does not."""
    return next(((number, meeting) for number, one in enumerate(watched) if (meeting := one.meeting())), None)


def who_never_comes(watched: Sequence[Watched], beats: Mapping[int, Word], program: Program) -> tuple[int | None, str]:
    """Returns the worker that never comes to `program`, and the words for the meeting at which it waits; (None, "") if all come.

    Args:
        beats: what the other workers have said of themselves, by their index; "meeting" is their `meeting_of`.
    """
    nowhere: tuple[int, Word] = (len(watched), {})
    for index, beat in beats.items():
        number, meeting = beat.get("meeting") or nowhere
        if number < len(watched) and watched[number].never_comes(meeting, index, program):
            return index, meeting["at"]
    return None, ""
