"""Where `fit` is in its data, and how another process comes to the same place.

A program that is started again makes its datasets from the same seeds, so that they are as they were when `fit` began. What `fit`
has done with them since then is done again, by Keras's own enumeration of an epoch's steps, as far as the order depends on it:

    epochs that are over     their iterators are made, and not read: `shuffle` draws an order when its iterator is made, and
                             random operations in a `map` start anew in each
    the epoch that runs      the batches that it has had are read and dropped

Epochs that are over are read and dropped, too, where reading is what moves the data on: one iterator for many epochs
(`steps_per_epoch`), a `shuffle` behind which `repeat`, `cache` or another `shuffle` asks for its iterator late, a function that
writes to a variable (Keras's layers of random augmentation), Python code. A `PyDataset` is told of each epoch, and not asked for
its batches; the order that Keras shuffles it in, and what it draws from Python's and NumPy's global generators, are found again
by their states at the beginning of the epoch.

Note: what cannot be found again. `shuffle` without any seed, and `deterministic=False`: see `unfindable`. A Python generator that
the user has made is read from its beginning, in the hope that it yields the same again.

Private to Keras: `EpochIterator` and its adapters; tests/data/test_position.py fails when they change.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from tfdist import errors
from tfdist.data.signature import (
    DatasetSignature,
    dataset_signature,
    difference,
    inputs_of,
    operations_of,
    unordered,
    unseeded,
    unwrapped,
)
from tfdist.runtime import random_states, set_random_states

Steps = Iterable[tuple[int, int, Any]]  # first and last batch of an execution, and the iterator that has them

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
# Attributes of Keras's iterator.
_LOG, _JOURNEY, _RANDOM = "_tfdist_epochs", "_tfdist_journey", "_tfdist_random"
_QUIET_SECONDS = 10.0  # before reading on is told of, and between two lines of it


def given_dataset(iterator: Any) -> tf.data.Dataset | None:
    """Returns the dataset of this worker that Keras's `iterator` reads, before it is split for devices."""
    distributed = iterator._distributed_dataset
    for name in ("given", "_original_dataset"):
        if getattr(distributed, name, None) is not None:
            return getattr(distributed, name)
    parts = getattr(distributed, "_datasets", None)  # of a function of each worker
    return parts[0] if parts else None


def unfindable(iterator: Any) -> str:
    """Returns why the place in the data of Keras's `iterator` cannot be found by another process; "" where it can."""
    signature = _signature(iterator)
    if signature is None or isinstance(iterator.data_adapter, GeneratorDataAdapter | PyDatasetAdapter):
        return ""
    for found, why in ((unseeded(signature), "has no seed"), (unordered(signature), "yields its elements in any order")):
        if found:
            return f"{found[0]} {why}"
    return ""


def is_generator(iterator: Any) -> bool:
    """Whether Keras's `iterator` reads a Python generator, which begins where the user's program has left it."""
    return isinstance(iterator.data_adapter, GeneratorDataAdapter)


def first_batch(iterator: Any) -> Any:
    """Returns the first batch of a generator, which Keras has read when it made its `iterator`, and will yield again."""
    return iterator.data_adapter._first_batches[0]


def position_of(iterator: Any, batches: int) -> dict[str, Any]:
    """Returns a place in the data of Keras's `iterator`, as what JSON can carry: `batches` of the epoch that runs, 0 its end."""
    signature = _signature(iterator)
    return {
        "epochs": log_of(iterator).past(with_current=batches == 0),
        "batches": batches,
        "random": vars(iterator).get(_RANDOM),
        "signature": None if signature is None else signature.to_json(),
    }


def check_same_data(iterator: Any, position: dict[str, Any]) -> None:
    """Raises ValueError when the data of Keras's `iterator` are not those that `position` is a place in, as far as is known."""
    mine, theirs = _signature(iterator), position["signature"]
    if mine is None or theirs is None:
        return
    # Through text and back: what was stored has become lists there.
    different = difference(DatasetSignature.from_json(mine.to_json()), DatasetSignature.from_json(theirs))
    if different is not None:
        raise errors.value_error(
            f"The backup is of the middle of an epoch, and the data are not those of that epoch: {different} in the backup.",
            fix="Give `fit` the same data as before, made after the same `keras.utils.set_random_seed`, or remove `backup_dir`.",
        )


def _signature(iterator: Any) -> DatasetSignature | None:
    dataset = given_dataset(iterator)
    return None if dataset is None else dataset_signature(dataset)


def must_be_read(iterator: Any, starts_anew: bool = False) -> bool:
    """Whether epochs that are over must be read to come to a place behind them, instead of making their iterators only.

    With `starts_anew` each epoch has an iterator of its own even with `steps_per_epoch`, as `evaluate` has.
    """
    steps, batches = iterator.steps_per_epoch, iterator.data_adapter.num_batches
    keeps_its_iterator = steps is not None and not (batches and steps >= batches)
    if keeps_its_iterator and not starts_anew or is_generator(iterator):
        return True
    if isinstance(iterator.data_adapter, PyDatasetAdapter):
        return False
    dataset = given_dataset(iterator)
    return dataset is None or _moves_on_when_read(dataset)


def _moves_on_when_read(dataset: tf.data.Dataset) -> bool:
    waiting = [(dataset, False)]
    while waiting:
        last, is_made_late = waiting.pop()
        node, name = unwrapped(last)
        if name == "VariantDataset":  # what is inside cannot be seen
            return True
        if any(op.type.startswith(_KEEPING) for op in operations_of(node)):
            return True
        draws = getattr(node, "_reshuffle_each_iteration", None) or getattr(node, "_rerandomize", None)
        if draws is not None and draws is not False and is_made_late:
            return True
        waiting += [(each, is_made_late or name not in _MADE_AT_ONCE) for each in inputs_of(node)]
    return False


# Going there


def go_to(iterator: Any, position: dict[str, Any], say: Callable[[str], None], starts_anew: bool = False) -> None:
    """Lets Keras's `iterator` begin at `position` when it is enumerated next. `say` is called with lines for the user.

    A position with `"ends": True` is the end of its epoch, whatever data there would be; `starts_anew` is as in `must_be_read`.
    """
    vars(iterator)[_JOURNEY] = _Journey(iterator, position, say, starts_anew)


def steps_of(iterator: Any, enumerate_epoch: Callable[[], Steps]) -> Steps:
    """Returns the steps of the next epoch of Keras's `iterator`, as `enumerate_epoch()` does, from where `go_to` has said.

    The steps of what nobody asks the position of are left alone.
    """
    journey = vars(iterator).pop(_JOURNEY, None)
    if journey is not None:
        return journey.steps(enumerate_epoch)
    if _LOG not in vars(iterator):
        return enumerate_epoch()
    if isinstance(iterator.data_adapter, PyDatasetAdapter):
        vars(iterator)[_RANDOM] = random_states()
    return vars(iterator)[_LOG].follow(enumerate_epoch())


def log_of(iterator: Any) -> EpochLog:
    """Returns how the epochs of Keras's `iterator` have ended, which are noted from the first call on."""
    return vars(iterator).setdefault(_LOG, EpochLog())


class EpochLog:
    """How the epochs of an iterator have ended: None behind their last step, or in which step the data had run out.

    Keras leaves an epoch that ends by running out where it is, and makes an iterator more at the end of any other.
    """

    def __init__(self) -> None:
        self._ends: list[int | None] = []
        self._current: int | None = None  # steps begun; None: no epoch, or one that has ended behind its last step

    def past(self, with_current: bool = False) -> list[list[Any]]:
        """Returns the epochs that are over, as runs of [number, how they ended]."""
        current = [self._current] if with_current and self._current is not None else []
        return [[len(list(run)), end] for end, run in itertools.groupby([*self._ends, *current])]

    def follow(self, steps: Steps) -> Iterator[tuple[int, int, Any]]:
        """Yields the `steps` of the next epoch, and notes how it ends."""
        if self._current is not None:
            self._ends.append(self._current)
        self._current = 0
        for step in steps:
            self._current += 1
            yield step
        self._ends.append(None)
        self._current = None


class _Journey:
    """The way of Keras's iterator to a position."""

    def __init__(self, iterator: Any, position: dict[str, Any], say: Callable[[str], None], starts_anew: bool):
        self._iterator, self._position, self._say = iterator, position, say
        self._reads, self._starts_anew = must_be_read(iterator, starts_anew), starts_anew
        self._number, self._told = 0, time.monotonic()

    def steps(self, enumerate_epoch: Callable[[], Steps]) -> Iterator[tuple[int, int, Any]]:
        iterator, position, log = self._iterator, self._position, log_of(self._iterator)
        for number, end in position["epochs"]:
            for _ in range(number):
                self._pass_epoch(log.follow(enumerate_epoch()), end)
                if self._starts_anew:
                    running = iterator._epoch_iterator  # this one
                    iterator.reset()
                    iterator._epoch_iterator = running
        if isinstance(iterator.data_adapter, PyDatasetAdapter):
            if position["random"] is not None and not self._reads:
                set_random_states(position["random"])
            vars(iterator)[_RANDOM] = random_states()
        if position.get("ends"):
            return
        for begin, end, batches in log.follow(enumerate_epoch()):
            if begin >= position["batches"]:
                yield begin, end, batches
            else:
                self._take(batches, end + 1 - begin)
        if self._number and time.monotonic() - self._told > _QUIET_SECONDS:
            self._say(f"{self._number:,} batches were read and dropped to come to the place of the backup")

    def _pass_epoch(self, steps: Steps, end: int | None) -> None:
        """Has an epoch that is over once more, without its steps: one that has ended in `end`, as `EpochLog` notes it."""
        iterator = self._iterator
        enqueuer = getattr(iterator.data_adapter, "enqueuer", None)
        if enqueuer is not None and not self._reads:
            iterator.data_adapter.enqueuer = None  # it would read ahead, and keep what it has read
        with warnings.catch_warnings(), iterator.catch_stop_iteration():
            warnings.simplefilter("ignore")  # that the data have run out was said when they did
            for number, (first, last, batches) in enumerate(steps, start=1):
                if self._reads and not self._take(batches, last + 1 - first) or number == end:
                    raise StopIteration
        if enqueuer is not None:
            iterator.data_adapter.enqueuer = enqueuer

    def _take(self, batches: Iterator[Any], number: int) -> bool:
        """Reads and drops so many batches; returns False when there was none."""
        for index in range(number):
            try:
                next(batches)
            except StopIteration:
                return index > 0
            self._number += 1
            if time.monotonic() - self._told > _QUIET_SECONDS:
                self._told = time.monotonic()
                self._say(f"{self._number:,} batches read and dropped so far, on the way to the place of the backup")
        return True
