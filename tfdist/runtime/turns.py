"""Threads of a worker that run programs of collectives: in one order on all workers, or refused.

the same thread as before       nothing
another thread, between calls   the workers meet: all hand over after the same call
another thread, beside a call   refused: nobody knows which one comes first on another worker
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tfdist.runtime.coordination import Coordination
from tfdist.runtime.outside_writes import FIX, OutsideWrites

_IN_TURN = (
    "Let one thread run what trains, evaluates, predicts or reads weights, and give it the others' work in an order that is the "
    "same on every worker; or predict in a job of its own, of one process."
)
_helping = threading.local()


def help_another() -> None:
    """Notes that this thread does another one's work, which waits for it: it needs no turn of its own."""
    _helping.is_so = True


class Turns:
    """Whose turn it is on this worker.

    Attributes:
        writes: what was assigned outside of steps.
    """

    def __init__(self, coordination: Coordination, timeout_seconds: float):
        self._coordination = coordination
        self.writes = OutsideWrites(coordination)
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._last: Any = None  # the thread
        self._inside = 0  # how many calls of its, one within another
        self._calls = 0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """A block in which this thread calls a program of collectives.

        Raises:
            RuntimeError: another thread is in one; or another worker hands over elsewhere.
        """
        if getattr(_helping, "is_so", False):
            yield
            return
        here = threading.current_thread()
        with self._lock:
            last = self._last
            is_beside = self._inside and last is not here
            if not is_beside:
                self._last, self._inside, self._calls = here, self._inside + 1, self._calls + 1
        if is_beside:
            self._fail(f"runs a program of collectives in the thread {here.name!r} while the thread {last.name!r} is in one")
        try:
            if last not in (None, here):
                numbers = self._coordination.meet("a step of another thread than the last one", str(self._calls), self._timeout)
                if len(set(numbers)) > 1:
                    self._fail(f"has run {self._calls} programs when another thread takes over, workers {numbers}")
            if words := self.writes.begin(self._calls):
                self._coordination.fail(words, fix=FIX)
            yield
        finally:
            with self._lock:
                self._inside -= 1

    def _fail(self, what: str) -> None:
        self._coordination.fail(
            f"Threads must take turns in one order on all workers, but {self._coordination.cluster.task} {what}.", fix=_IN_TURN
        )
