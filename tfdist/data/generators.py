"""Python generators whose batches `fit`, `evaluate` and `predict` read ahead, and give back.

    a generator      0 1 2 3 4 5 6 7 ...
    fit, 3 steps     0 1 2 | 3 4           two were read ahead
    the next one           3 4 5 | 6 ...   has them again

Keras reads the first batches to see what they are, TensorFlow reads ahead of the steps, and what no step has taken would be lost
when the call is over: another number of batches on each worker, which would train on different ones from then on.
"""

import collections
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any


class Tape:
    """What a call reads of a generator: behind what the call before it has read, and no step has taken."""

    _tapes: "weakref.WeakKeyDictionary[types.GeneratorType[Any, Any, Any], Tape]" = weakref.WeakKeyDictionary()

    def __init__(self, given_back: Iterable[Any]):
        self._read = collections.deque(given_back)  # without those that are dropped
        self._used = self._dropped = 0  # batches; steps, which are another thread's, use them before or behind their reading

    @classmethod
    def of(cls, generator: "types.GeneratorType[Any, Any, Any]") -> "Tape":
        """Returns the tape of a call that is given `generator`; that of the call before is over."""
        before = cls._tapes.get(generator)
        tape = cls._tapes[generator] = cls(() if before is None else before._unused())
        return tape

    def _unused(self) -> collections.deque[Any]:
        while self._dropped < self._used and self._read:
            self._read.popleft()
            self._dropped += 1
        return self._read

    def batches(self, generator: "types.GeneratorType[Any, Any, Any]") -> Iterator[Any]:
        """Yields what was given back, and then the batches of `generator`, which stays open; a generator itself."""
        yield from list(self._read)
        for batch in generator:
            self._unused().append(batch)
            yield batch

    def use(self, number: int) -> None:
        """Says that a step takes the next `number` batches."""
        self._used += number

    def used_by(self, steps: Iterable[Any], batches: int) -> Iterator[Any]:
        """Yields `steps`, each of which takes so many batches."""
        for step in steps:
            self.use(batches)
            yield step
