"""Where `fit` is in its data, and how another process comes to the same place.

A program that is started again makes its datasets from the same seeds, so that they are as they were when `fit` began. What `fit`
has done with them since then is done again, by Keras's own enumeration of an epoch's steps, as far as the order depends on it:

    epochs that are over     their iterators are made, and not read: `shuffle` draws an order when its iterator is made, and
                             random operations in a `map` start anew in each
    the epoch that runs      the batches that it has had are read and dropped

Epochs that are over are read and dropped, too, where reading is what moves the data on: one iterator for many epochs
(`steps_per_epoch`), a `shuffle` before a `repeat`, `cache` or `shuffle`, which asks for its iterator late, a function that
writes to a variable (Keras's layers of random augmentation), Python code. Of a `PyDataset` the hooks of each epoch are called,
and no batches read; the order that Keras shuffles it in, and what it draws from Python's and NumPy's global generators, are
found again by their states at the beginning of the epoch.

Note: what cannot be found again. `shuffle` without any seed, and `deterministic=False`: see `PositionedIterator.unfindable`. A
Python generator of the user's is read from its beginning, in the hope that it yields the same again.
"""

import contextlib
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from tfdist import errors
from tfdist.data import EpochIterator, signature
from tfdist.data.epoch_iterator import Step
from tfdist.runtime import random_states, set_random_states
from tfdist.temporary import attributes

Epochs = list[list[Any]]  # that are over, as runs of [number, how they ended]

# Datasets that make the iterators of their inputs when their own is made.
_MADE_AT_ONCE = set(
    """
    BatchDataset ParallelBatchDataset PaddedBatchDataset UnbatchDataset RebatchDataset WindowDataset
    MapDataset ParallelMapDataset FilterDataset FlatMapDataset InterleaveDataset ParallelInterleaveDataset ScanDataset
    PrefetchDataset OptionsDataset TakeDataset SkipDataset TakeWhileDataset ShardDataset ZipDataset AssertCardinalityDataset
    RestructuredDataset DenseToRaggedDataset IgnoreErrorsDataset
    """.split()
)
# Operations by which a function that is mapped over elements keeps something beyond its iterator, or may do so.
_KEEPING = ("Assign", "Rng", "PyFunc", "EagerPyFunc")
_QUIET_SECONDS = 10.0  # before a line says that batches are read, and between two such lines


class EpochLog:
    """How the epochs of an iterator have ended: None after their last step, or in which step the data had run out.

    Keras leaves an epoch that ends by running out where it is, and makes an iterator more at the end of any other.
    """

    def __init__(self) -> None:
        self._ends: list[int | None] = []
        self._current: int | None = None  # steps begun; None: no epoch, or one that has ended after its last step

    def past(self, with_current: bool = False) -> Epochs:
        """Returns the epochs that are over."""
        current = [self._current] if with_current and self._current is not None else []
        return [[len(list(run)), end] for end, run in itertools.groupby([*self._ends, *current])]

    def follow(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yields the `steps` of the next epoch, and notes how it ends."""
        if self._current is not None:
            self._ends.append(self._current)
        self._current = 0
        for step in steps:
            self._current += 1
            yield step
        self._ends.append(None)
        self._current = None


class _Dropped:
    """Batches that are read and dropped on the way to a place; `say` is called with lines for the user."""

    def __init__(self, say: Callable[[str], None]):
        self._say, self._number, self._told = say, 0, time.monotonic()

    def take(self, batches: Iterator[Any], number: int) -> bool:
        """Reads and drops so many batches; returns False when there was none."""
        for index in range(number):
            try:
                next(batches)
            except StopIteration:
                return index > 0
            self._number += 1
            self.tell("so far, on the way to the place of the backup")
        return True

    def tell(self, where: str) -> None:
        if self._number and time.monotonic() - self._told > _QUIET_SECONDS:
            self._told = time.monotonic()
            self._say(f"{self._number:,} batches read and dropped {where}")


class PositionedIterator(EpochIterator):
    """An `EpochIterator` that knows where it is, and can begin at a place that another process was at."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.log = EpochLog()  # how its epochs have ended
        self._journey: Iterator[Step] | None = None  # the steps of the next epoch, if it begins elsewhere
        self._random: Any = None  # the random states at the beginning of the epoch that runs, of a `PyDataset`
        super().__init__(*args, **kwargs)

    @property
    def _is_py_dataset(self) -> bool:
        return isinstance(self.data_adapter, PyDatasetAdapter)

    @property
    def _given_dataset(self) -> tf.data.Dataset | None:
        """The dataset of this worker that it reads, before it is split for devices."""
        given, parts = (getattr(self._distributed_dataset, name, None) for name in ("given", "_datasets"))
        return parts[0] if given is None and parts else given  # parts: of a function of each worker

    def _signature(self) -> signature.Signature | None:
        return None if self._given_dataset is None else signature.dataset_signature(self._given_dataset)

    def _enumerate_iterator(self) -> Iterable[Step]:
        journey, self._journey = self._journey, None
        return journey or (self._steps() if self._is_ours else super()._enumerate_iterator())

    def _steps(self) -> Iterator[Step]:
        """Returns the steps of the next epoch, from its beginning; `log` notes how it ends."""
        if self._is_py_dataset:
            self._random = random_states()
        return self.log.follow(super()._enumerate_iterator())

    # What a backup asks

    def unfindable(self) -> str:
        """Returns why the place in these data cannot be found by another process; "" where it can."""
        parts = [] if self.is_generator or self._is_py_dataset else self._signature() or []
        found = [f"{part} has no seed" for part in signature.unseeded(parts)]
        found += [f"{part} yields its elements in any order" for part in signature.unordered(parts)]
        if not found:
            return ""
        fix = "`keras.utils.set_random_seed(...)` before the data are made seeds what has no seed."
        return f"a place in the middle of one cannot be found again in these data: {found[0]}. {fix}"

    def position(self, batches: int) -> dict[str, Any]:
        """Returns the place after `batches` of the epoch that runs, with 0 after its end, as what JSON can carry."""
        return {
            "epochs": self.log.past(with_current=batches == 0),
            "batches": batches,
            # After the end of an epoch the next one begins with what it has left.
            "random": self._random if batches or not self._is_py_dataset else random_states(),
            "signature": json.dumps(self._signature()),
        }

    def check(self, position: dict[str, Any]) -> None:
        """Raises ValueError for a `position` in the middle of an epoch of other data; warns if none can be known in these."""
        mine, theirs = self._signature(), json.loads(position["signature"] or "null")
        different = mine and theirs and signature.difference(mine, theirs)
        if different and position["batches"]:
            raise errors.value_error(
                f"The backup is of the middle of an epoch, and the data are not those of that epoch: {different} in the backup.",
                fix="Give `fit` the same data as before, made after the same `keras.utils.set_random_seed`, or remove "
                "`backup_dir`.",
            )
        if self.is_generator:
            errors.warn(
                "`fit` goes on from a backup, and its data are a Python generator, of which the place cannot be known: batches "
                "that were read before the failure are read and dropped, which is right if the generator yields the same again. "
                "A `tf.data.Dataset` or a `keras.utils.PyDataset` goes on at its place for certain."
            )

    # Going there

    def must_be_read(self, starts_anew: bool = False) -> bool:
        """Whether epochs that are over must be read to come to a place after them, instead of making their iterators only.

        With `starts_anew` each epoch has an iterator of its own even with `steps_per_epoch`, as `evaluate` has.
        """
        steps, batches = self.steps_per_epoch, self.data_adapter.num_batches
        keeps_its_iterator = steps is not None and not (batches and steps >= batches)
        if keeps_its_iterator and not starts_anew or self.is_generator:
            return True
        return not self._is_py_dataset and (self._given_dataset is None or _moves_on_when_read(self._given_dataset))

    def go_to(self, position: dict[str, Any], say: Callable[[str], None], starts_anew: bool = False) -> None:
        """Lets the next epoch begin at a `position`; with None batches: at its end. `say` is called with lines for the user."""
        self._journey = self._steps_from(position, _Dropped(say), starts_anew)

    def _steps_from(self, position: dict[str, Any], dropped: _Dropped, starts_anew: bool) -> Iterator[Step]:
        reads, batches = self.must_be_read(starts_anew), position["batches"]
        for number, end in position["epochs"]:
            for _ in range(number):
                self._pass_epoch(end, dropped if reads else None)
                if starts_anew:
                    with attributes(self, _epoch_iterator=None):  # it is this one, which goes on
                        self.reset()
        if position["random"] is not None and not reads:
            set_random_states(position["random"])
        if batches is None:
            return
        steps = self._steps()
        for begin, end, data in itertools.islice(steps, math.ceil(batches / self.steps_per_execution)):
            dropped.take(data, end + 1 - begin)
        dropped.tell("to come to the place of the backup")
        yield from steps

    def _pass_epoch(self, end: int | None, dropped: _Dropped | None) -> None:
        """Has an epoch that is over once more, without its steps: one that has ended in `end`, as `EpochLog` notes it."""
        # An enqueuer would read ahead, and keep what it has read.
        in_place = attributes(self.data_adapter, enqueuer=None) if dropped is None else contextlib.nullcontext()
        with in_place, warnings.catch_warnings(), self.catch_stop_iteration():
            warnings.simplefilter("ignore")  # that the data have run out was said when they did
            for number, (first, last, batches) in enumerate(self._steps(), start=1):
                if dropped is not None and not dropped.take(batches, last + 1 - first) or number == end:
                    raise StopIteration


def _moves_on_when_read(dataset: tf.data.Dataset) -> bool:
    """Whether the next epoch of `dataset` depends on how far its iterators before were read, and not only on their number."""
    waiting = [(dataset, False)]
    while waiting:
        last, is_made_late = waiting.pop()
        node, name = signature.unwrapped(last)
        if name == "VariantDataset":  # what is inside cannot be seen
            return True
        if any(op.type.startswith(_KEEPING) for op in signature.operations_of(node)):
            return True
        reshuffles = getattr(node, "_reshuffle_each_iteration", False) is not False  # None, as in TensorFlow 1, is True
        if is_made_late and (reshuffles or getattr(node, "_rerandomize", False)):
            return True
        waiting += [(each, is_made_late or name not in _MADE_AT_ONCE) for each in signature.inputs_of(node)]
    return False
