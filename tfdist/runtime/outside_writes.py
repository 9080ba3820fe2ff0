"""What workers assign outside of steps, to variables that all hold: the same on all, or the job ends with the variable's name.

    worker 0    model.set_weights(a)     program 7   tells "before 7: kernel 5fa3"    and waits for nobody
    worker 1                             program 7   hears it, now or later, and has said nothing of 7: they part

Each worker numbers its programs of collectives (steps, evaluations, readings), which are the same on all; see `turns`. A word has
digests, and costs nothing where nothing was assigned.
"""

import collections
import contextlib
import itertools
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdist import errors
from tfdist.runtime.coordination import Coordination

Written = list[list[Any]]  # of each assignment the variable's name and a digest, in order

# Of so many programs that something was assigned before, and of so many assignments each, a worker remembers what. What goes
# beyond shares the digest of the last.
_MOST_PROGRAMS, _MOST_WRITES = 4096, 64


FIX = (
    "Let every worker assign the same: `value = strategy.from_chief(value)`, called by all, returns the first worker's value on "
    "each. Or load one file everywhere, and seed what is drawn."
)


def digest_of(value: Any) -> int:
    """Returns a digest of an array's numbers, or of its strings."""
    array = np.asarray(value)
    if array.dtype == object:
        return zlib.crc32(repr(array.tolist()).encode())
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data if array.size else b"", len(array.shape))


class OutsideWrites:
    """What this worker has assigned, and what it has heard of others'."""

    def __init__(self, coordination: Coordination):
        self._coordination = coordination
        coordination.listen("written", self._heard)
        self._lock = threading.Lock()
        self._now: Written = []  # since the last program
        self._number = 0
        self._own: collections.OrderedDict[int, Written] = collections.OrderedDict()  # by program
        self._others: dict[int, dict[int, Written]] = {}  # of programs that this worker has not come to, by worker

    def note(self, name: str, value: Any) -> None:
        """Notes that this worker assigns `value` to the variable `name`."""
        digest = digest_of(value)
        with self._lock:
            if len(self._now) == _MOST_WRITES:
                digest = zlib.crc32(digest.to_bytes(4, "big"), self._now.pop()[1])
            self._now.append([name, digest])

    @contextlib.contextmanager
    def noted(self, name: str) -> Iterator[None]:
        """A call of a function that assigns to the variable `name` what is not known here."""
        self.note(name, "in a function")
        yield

    def begin(self, number: int) -> str:
        """Tells what was assigned since the last program, when that of `number` begins; returns how others differ, "" if not."""
        with self._lock:
            written, self._now, self._number = self._now, [], number
            if written:
                self._own[number] = written
                if len(self._own) > _MOST_PROGRAMS:
                    self._own.popitem(last=False)
            heard = self._others.pop(number, {})
        if written:
            self._coordination.tell("written", [number, written])
        return next((words for index, theirs in heard.items() if (words := self._difference(index, written, theirs))), "")

    def _heard(self, index: int, heard: Any) -> str:
        """Returns how worker `index`, which has said this of one of its programs, differs; "" if not, or not yet."""
        number, theirs = heard
        with self._lock:
            if number > self._number:
                self._others.setdefault(number, {})[index] = theirs
                return ""
            own = self._own.get(number, [])
        words = self._difference(index, own, theirs)
        return errors.message(words, fix=FIX) if words else ""

    def _difference(self, index: int, own: Written, theirs: Written) -> str:
        if own == theirs:
            return ""
        cluster = self._coordination.cluster
        pairs = itertools.zip_longest(own, theirs, fillvalue=("", 0))
        both = next(zip((cluster.task, cluster.tasks[index]), pair, strict=True) for pair in pairs if pair[0] != pair[1])
        (first, (name, _)), (second, (other, _)) = sorted(both, key=lambda one: not one[1][0])
        there = f"not on {second}" if not other else f"another on {second}" if other == name else f"{other!r} on {second}"
        return f"Workers have assigned different values, outside of steps, to what all hold: {name!r} on {first}, and {there}."
