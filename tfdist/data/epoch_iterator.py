"""Keras's iterator over the steps of epochs: as many steps on every worker, and generators that lose nothing.

Private to Keras: `TFEpochIterator` and its adapters; tests/data/test_generators.py fails when they change.
"""

import collections
import contextlib
import json
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

from tfdist import errors
from tfdist.data.end_of_data import plain_errors
from tfdist.extensible import Place
from tfdist.sharding import config_of

Step = tuple[int, int, Any]  # first and last batch of an execution, and the iterator that has them


class Tape:
    """The elements of a Python generator that a call of `fit`, `evaluate` or `predict` reads, early, and gives back.

        a generator      0 1 2 3 4 5 6 7 ...
        fit, 3 steps     0 1 2 | 3 4           two were read ahead
        the next one           3 4 5 | 6 ...   has them again

    Keras reads the first batches to see what they are, TensorFlow reads ahead of the steps, and what no step has taken would be
    lost when the call is over: another number of batches on each worker, which would train on different ones from then on.
    """

    _tapes: "weakref.WeakKeyDictionary[types.GeneratorType[Any, Any, Any], Tape]" = weakref.WeakKeyDictionary()

    def __init__(self, given_back: Iterable[Any]):
        self._read = collections.deque(given_back)  # without those that are dropped
        self._used = self._dropped = 0  # batches; steps, which are another thread's, use them before or after they are read

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


class EpochIterator(TFEpochIterator):
    """Keras's iterator, which is left alone under other strategies. Each epoch has its steps from the first batch on."""

    _tape: Tape | None = None
    _current_iterator: Any  # Keras's

    def __init__(self, distribute_strategy: Any = None, *args: Any, **kwargs: Any):
        self._is_ours = config_of(distribute_strategy) is not None
        x = kwargs.get("x")
        if self._is_ours and isinstance(x, types.GeneratorType):
            self._tape = Tape.of(x)
            kwargs["x"] = self._tape.batches(x)
        super().__init__(distribute_strategy, *args, **kwargs)
        if self._is_ours:
            self._check_same_steps(distribute_strategy.extended)

    def _check_same_steps(self, extended: Any) -> None:
        """Raises ValueError, on every worker, when workers would take different numbers of steps.

        A `PyDataset` says how many batches it has, which is not the length of the dataset that Keras makes of it; and
        `steps_per_epoch` may be given on one worker only. A worker that takes a step more than the others waits for them.
        """
        mine = {
            "steps": self.steps_per_epoch,
            "batches of the data": self.data_adapter.num_batches,
            "steps_per_execution": self.steps_per_execution,
        }
        tasks = extended.names_of_processes
        first, *others = map(json.loads, extended.tell_all("the steps of an epoch", json.dumps(mine)))
        for task, numbers in zip(tasks[1:], others, strict=True):
            for name, number in numbers.items():
                if number != first[name]:
                    raise errors.value_error(
                        f"Every worker must take the same steps, but the number of {name} is {first[name]} on {tasks[0]} and "
                        f"{number} on {task}.",
                        fix="Give all workers the same `steps_per_epoch` (`steps`, `validation_steps`), and data of one length. "
                        "Parts of different lengths go through `strategy.distribute_datasets_from_function`.",
                    )

    @property
    def is_generator(self) -> bool:
        """Whether it reads a Python generator, which begins where the user's program has left it."""
        return isinstance(self.data_adapter, GeneratorDataAdapter)

    def reset(self) -> None:
        """Each validation would have a generator's first batches again, and then go on after those that the one before it has
        read ahead: how many these are differs from worker to worker."""
        running = self._current_iterator
        super().reset()
        if self._is_ours and self.is_generator:
            self._current_iterator = running

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        with plain_errors() if self._is_ours else contextlib.nullcontext(), super().catch_stop_iteration():
            yield

    def _enumerate_iterator(self) -> Iterable[Step]:
        found = super()._enumerate_iterator()
        return found if self._tape is None else self._tape.used_by(found, self.steps_per_execution)


EPOCH_ITERATOR: Place[type[EpochIterator]] = Place(EpochIterator)
