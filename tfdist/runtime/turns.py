"""Threads of a worker that run programs of collectives, in one order on all workers, and what it assigns between two programs.

the same thread as before       nothing, unless something was assigned
another thread, between calls   it tells the others which program is the k-th: where theirs is another, the job ends
another thread, beside a call   refused: nobody knows which one comes first on another worker
"""

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tfdist import errors, temporary
from tfdist.runtime.coordination import Coordination
from tfdist.runtime.outside_writes import FIX, Written, difference, digest_of

_IN_TURN = (
    "Let one thread run what trains, evaluates, predicts or reads weights, and give it the others' work in an order that is the "
    "same on every worker; or predict in a job of its own, of one process."
)
# Of so many programs a worker remembers which they were, and of so many assignments between two what; of more, how many.
_MOST = 4096
_helping = threading.local()


def helping_another() -> contextlib.AbstractContextManager[None]:
    """A block in which this thread does another one's work, which waits for it: it needs no turn of its own."""
    return temporary.attributes(_helping, is_so=True)


class Turns:
    """Whose turn it is on this worker, and what was assigned outside of steps."""

    def __init__(self, coordination: Coordination):
        self._coordination = coordination
        coordination.listen("programs", self._heard)
        self._lock = threading.Lock()
        self._last: Any = None  # the thread
        self._inside = 0  # how many calls of its, one within another
        self._calls = 0
        self._written: Written = []  # since the last program
        self._is_full = False
        self._own: collections.OrderedDict[int, tuple[str, Written]] = collections.OrderedDict()  # the latest programs, by number
        self._others: dict[int, list[tuple[int, str, Written]]] = collections.defaultdict(list)  # that this has not come to

    def note(self, number: int, name: str, value: Any) -> None:
        """Notes that this worker assigns `value` to the variable that was made as the `number`-th, `name`."""
        digest = digest_of(value)
        with self._lock:
            if len(self._written) == _MOST:
                digest = [[1 + (self._written.pop()[2][0][0] if self._is_full else 0)]]
                self._is_full = True
            self._written.append([number, name, digest])

    @contextlib.contextmanager
    def noted(self, number: int, name: str) -> Iterator[None]:
        """A call of a function that assigns to a variable what is not known here."""
        self.note(number, name, "in a function")
        yield

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
                written, self._written, self._is_full = self._written, [], False
                self._own[self._calls] = name, written
                if len(self._own) > _MOST:
                    self._own.popitem(last=False)
                heard = self._others.pop(self._calls, [])
        if is_beside:
            what = f"runs a program of collectives in the thread {here.name!r} while the thread {last.name!r} is in one"
            self._coordination.fail(self._words(what), fix=_IN_TURN)
        try:
            is_another = last not in (None, here)
            if is_another or written:
                self._coordination.tell("programs", [self._calls, name if is_another else "", written])
            for word in heard:
                if found := self._difference(name, written, *word):
                    self._coordination.fail(found[0], fix=found[1])
            yield
        finally:
            with self._lock:
                self._inside -= 1

    def _heard(self, index: int, heard: Any) -> str:
        number, *word = heard
        with self._lock:
            if number > self._calls:
                self._others[number].append((index, *word))
                return ""
            own = self._own.get(number)
        found = None if own is None else self._difference(*own, index, *word)
        return errors.message(found[0], fix=found[1]) if found else ""

    def _difference(self, name: str, written: Written, index: int, its_name: str, its_written: Written) -> tuple[str, str] | None:
        """Returns how worker `index` differs in one program, which it has told of, and the fix; None: in nothing."""
        if its_name not in ("", name):
            return self._words("runs another program than a worker that has handed over"), _IN_TURN
        cluster = self._coordination.cluster
        words = difference(written, its_written, cluster.task, cluster.tasks[index])
        return (words, FIX) if words else None

    def _words(self, what: str) -> str:
        return f"Threads must take turns in one order on all workers, but {self._coordination.cluster.task} {what}."
