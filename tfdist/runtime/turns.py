"""Threads of a worker that run programs of collectives: in one order on all workers, or refused.

the same thread as before       nothing
another thread, between calls   it tells the others which program is the k-th: where theirs is another, the job ends
another thread, beside a call   refused: nobody knows which one comes first on another worker
"""

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tfdist import errors
from tfdist.runtime.coordination import Coordination
from tfdist.runtime.outside_writes import FIX, OutsideWrites

_IN_TURN = (
    "Let one thread run what trains, evaluates, predicts or reads weights, and give it the others' work in an order that is the "
    "same on every worker; or predict in a job of its own, of one process."
)
_MOST_PROGRAMS = 4096  # of so many a worker remembers which they were
_helping = threading.local()


def help_another() -> None:
    """Notes that this thread does another one's work, which waits for it: it needs no turn of its own."""
    _helping.is_so = True


class Turns:
    """Whose turn it is on this worker.

    Attributes:
        writes: what was assigned outside of steps.
    """

    def __init__(self, coordination: Coordination):
        self._coordination = coordination
        self.writes = OutsideWrites(coordination)
        coordination.listen("programs", self._heard)
        self._lock = threading.Lock()
        self._last: Any = None  # the thread
        self._inside = 0  # how many calls of its, one within another
        self._calls = 0
        self._programs: collections.OrderedDict[int, str] = collections.OrderedDict()  # the latest, by number
        self._others: dict[int, list[str]] = collections.defaultdict(list)  # what others run as one that this has not come to

    @contextlib.contextmanager
    def taken(self, plan: Any) -> Iterator[None]:
        """A block in which this thread calls the program of `plan`, in which all workers have a part.

        Raises:
            RuntimeError: another thread is in one; or another worker runs another, or has assigned something else.
        """
        if getattr(_helping, "is_so", False):
            yield
            return
        here, name = threading.current_thread(), plan.name
        with self._lock:
            last = self._last
            is_beside = self._inside and last is not here
            if not is_beside:
                self._last, self._inside, self._calls = here, self._inside + 1, self._calls + 1
                self._programs[self._calls] = name
                if len(self._programs) > _MOST_PROGRAMS:
                    self._programs.popitem(last=False)
                heard = self._others.pop(self._calls, [])
        if is_beside:
            self._fail(f"runs a program of collectives in the thread {here.name!r} while the thread {last.name!r} is in one")
        try:
            if last not in (None, here):
                self._coordination.tell("programs", [self._calls, name])
            if any(other != name for other in heard):
                self._fail(f"runs another program in the thread {here.name!r} than a worker that has handed over")
            if words := self.writes.begin(self._calls):
                self._coordination.fail(words, fix=FIX)
            yield
        finally:
            with self._lock:
                self._inside -= 1

    def _heard(self, index: int, heard: Any) -> str:
        number, program = heard
        with self._lock:
            if number > self._calls:
                self._others[number].append(program)
                return ""
            own = self._programs.get(number, program)
        words = self._words("runs another program than a worker that has handed over")
        return "" if own == program else errors.message(words, fix=_IN_TURN)

    def _words(self, what: str) -> str:
        return f"Threads must take turns in one order on all workers, but {self._coordination.cluster.task} {what}."

    def _fail(self, what: str) -> None:
        self._coordination.fail(self._words(what), fix=_IN_TURN)
