"""Python generators whose batches `fit`, `evaluate` and `predict` read ahead, and give back.

    a generator      0 1 2 3 4 5 6 7 ...
    fit, 3 steps     0 1 2 | 3 4           two were read ahead
    the next one           3 4 5 | 6 ...   has them again

Keras reads the first batches to see what they are, TensorFlow reads ahead of the steps, and what no step has taken would be lost
when the call is over: another number of batches on each worker, which would train on different ones from then on.
"""

from __future__ import annotations

import collections
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any


class Tape:
    """What a call reads of a generator: behind what the call before it has read, and no step has taken."""

    _tapes: weakref.WeakKeyDictionary[types.GeneratorType[Any, Any, Any], Tape] = weakref.WeakKeyDictionary()

    def __init__(self, given_back: Iterable[Any]):
        self._unused = collections.deque(given_back)
        self._missing = 0  # batches that steps have asked for, and that are not read yet
        self._lock = threading.Lock()  # steps are another thread's

    @classmethod
    def of(cls, generator: types.GeneratorType[Any, Any, Any]) -> Tape:
        """Returns the tape of a call that is given `generator`; that of the call before is over."""
        before = cls._tapes.get(generator)
        tape = cls._tapes[generator] = cls(() if before is None else before._unused)
        return tape

    def batches(self, generator: types.GeneratorType[Any, Any, Any]) -> Iterator[Any]:
        """Yields what was given back, and then the batches of `generator`, which stays open; a generator itself."""
        yield from list(self._unused)
        for batch in generator:
            with self._lock:
                if self._missing:
                    self._missing -= 1
                else:
                    self._unused.append(batch)
            yield batch

    def use(self, number: int) -> None:
        """Says that a step takes the next `number` batches."""
        with self._lock:
            for _ in range(number):
                if self._unused:
                    self._unused.popleft()
                else:
                    self._missing += 1

    def used_by(self, steps: Iterable[Any], batches: int) -> Iterator[Any]:
        """Yields `steps`, each of which takes so many batches."""
        for step in steps:
            self.use(batches)
            yield step
