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
import tensorflow as tf

from tfdist import errors
from tfdist.runtime.coordination import Coordination

Written = list[list[Any]]  # of each assignment the variable's number, its name and a digest, in order

# Of so many programs that something was assigned before, and of so many assignments each, a worker knows what; of more, how many.
_MOST = 4096
_TOLERANCE = 1e-5  # of the norm: the last bits of floats may differ between machines
_WEIGHTS = np.random.default_rng(0).normal(size=2**16)
FIX = (
    "Let every worker assign the same: `value = strategy.from_chief(value)`, called by all, returns the first worker's value on "
    "each. Or load one file everywhere, and seed what is drawn."
)


def digest_of(value: Any) -> list[list[float]]:
    """Returns a digest of what is assigned: of floats their number, a weighted sum and the norm, of all else a checksum."""
    return [_digest(np.asarray(leaf)) for leaf in tf.nest.flatten(value, expand_composites=True)]


def _digest(array: np.ndarray) -> list[float]:
    if array.dtype == object:
        return [zlib.crc32(repr(array.tolist()).encode())]
    if tf.as_dtype(array.dtype).is_integer or array.dtype.kind in "bSU":
        return [zlib.crc32(np.ascontiguousarray(array).tobytes())]
    flat = np.ascontiguousarray(array).reshape(-1)
    flat = flat.view(flat.real.dtype) if array.dtype.kind == "c" else flat
    total = norm = 0.0
    for number, start in enumerate(range(0, flat.size, _WEIGHTS.size)):
        part = np.nan_to_num(flat[start : start + _WEIGHTS.size].astype(np.float64), posinf=1.0, neginf=-1.0)
        total += float(part @ _WEIGHTS[: part.size]) * np.cos(number + 1.0)
        norm += float(part @ part)
    return [flat.size, total, norm**0.5]


def is_same(one: list[Any], other: list[Any]) -> bool:
    """Whether two assignments may be the same: of one variable, and of one value."""
    pairs = list(zip(one[2], other[2], strict=False))
    sizes = one[0] == other[0] and [len(x) for x in one[2]] == [len(x) for x in other[2]] and all(x[0] == y[0] for x, y in pairs)
    return sizes and all(abs(x[1] - y[1]) <= _TOLERANCE * max(x[2], y[2]) for x, y in pairs if len(x) > 1)


class OutsideWrites:
    """What this worker has assigned, and what it has heard of others'."""

    def __init__(self, coordination: Coordination):
        self._coordination = coordination
        coordination.listen("written", self._heard)
        self._lock = threading.Lock()
        self._now: Written = []  # since the last program
        self._number = 0
        self._is_full = False
        self._own: collections.OrderedDict[int, Written] = collections.OrderedDict()  # by program
        self._others: dict[int, dict[int, Written]] = {}  # of programs that this worker has not come to, by worker

    def note(self, number: int, name: str, value: Any) -> None:
        """Notes that this worker assigns `value` to the variable that was made as the `number`-th, `name`."""
        digest = digest_of(value)
        with self._lock:
            if len(self._now) == _MOST:
                digest = [[1 + (self._now.pop()[2][0][0] if self._is_full else 0)]]
                self._is_full = True
            self._now.append([number, name, digest])

    @contextlib.contextmanager
    def noted(self, number: int, name: str) -> Iterator[None]:
        """A call of a function that assigns to a variable what is not known here."""
        self.note(number, name, "in a function")
        yield

    def begin(self, number: int) -> str:
        """Tells what was assigned since the last program, when that of `number` begins; returns how others differ, "" if not."""
        with self._lock:
            written, self._now, self._number, self._is_full = self._now, [], number, False
            if written:
                self._own[number] = written
                if len(self._own) > _MOST:
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
        pairs = itertools.zip_longest(own, theirs, fillvalue=[-1, "", []])
        different = next((pair for pair in pairs if not is_same(*pair)), None)
        if different is None:
            return ""
        cluster = self._coordination.cluster
        both: Any = zip((cluster.task, cluster.tasks[index]), different, strict=True)
        (first, (number, name, _)), (second, (other, other_name, _)) = sorted(both, key=lambda one: one[1][0] < 0)
        there = f"not on {second}" if other < 0 else f"another on {second}" if other == number else f"{other_name!r} on {second}"
        return f"Workers have assigned different values, outside of steps, to what all hold: {name!r} on {first}, and {there}."
