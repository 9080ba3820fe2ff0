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

Note: what cannot be found again. `shuffle` without any seed, and `deterministic=False`: see `FitData.unfindable`. A Python
generator of the user's is read from its beginning, in the hope that it yields the same again.
"""

import contextlib
import json
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.data.epoch_iterator import EpochIterator, EpochLog, Step
from tfdist.data.signature import (
    Signature,
    dataset_signature,
    difference,
    inputs_of,
    operations_of,
    unordered,
    unseeded,
    unwrapped,
)
from tfdist.runtime import random_states, set_random_states

Say = Callable[[str], None]

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
_FIT = "_tfdist_fit_data"  # an attribute of a model
_QUIET_SECONDS = 10.0  # before reading on is told of, and between two lines of it


def must_be_read(iterator: EpochIterator, starts_anew: bool = False) -> bool:
    """Whether epochs that are over must be read to come to a place behind them, instead of making their iterators only.

    With `starts_anew` each epoch has an iterator of its own even with `steps_per_epoch`, as `evaluate` has.
    """
    steps, batches = iterator.steps_per_epoch, iterator.data_adapter.num_batches
    keeps_its_iterator = steps is not None and not (batches and steps >= batches)
    if keeps_its_iterator and not starts_anew or iterator.is_generator:
        return True
    dataset = iterator.given_dataset
    return not iterator.is_py_dataset and (dataset is None or _moves_on_when_read(dataset))


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


class _Journey:
    """The way of Keras's iterator to `batches` of the epoch behind the `epochs` that are over; None: to the end of that epoch.

    With `starts_anew` each epoch has an iterator of its own, as in `must_be_read`. `say` is called with lines for the user.
    """

    def __init__(
        self, iterator: EpochIterator, epochs: Any, batches: int | None, random: Any, say: Say, starts_anew: bool = False
    ):
        self._iterator, self._epochs, self._batches, self._random = iterator, epochs, batches, random
        self._reads, self._starts_anew = must_be_read(iterator, starts_anew), starts_anew
        self._say, self._number, self._told = say, 0, time.monotonic()

    def steps(self) -> Iterator[Step]:
        """Yields the steps that are left in that epoch."""
        iterator = self._iterator
        for number, end in self._epochs:
            for _ in range(number):
                self._pass_epoch(end)
                if self._starts_anew:
                    running = iterator._epoch_iterator  # this one
                    iterator.reset()
                    iterator._epoch_iterator = running
        if self._random is not None and not self._reads:
            set_random_states(self._random)
        if self._batches is None:
            return
        for begin, end, batches in iterator.logged_steps():
            if begin >= self._batches:
                yield begin, end, batches
            else:
                self._take(batches, end + 1 - begin)
        if self._number and time.monotonic() - self._told > _QUIET_SECONDS:
            self._say(f"{self._number:,} batches were read and dropped to come to the place of the backup")

    def _pass_epoch(self, end: int | None) -> None:
        """Has an epoch that is over once more, without its steps: one that has ended in `end`, as `EpochLog` notes it."""
        iterator = self._iterator
        enqueuer = getattr(iterator.data_adapter, "enqueuer", None)
        if enqueuer is not None and not self._reads:
            iterator.data_adapter.enqueuer = None  # it would read ahead, and keep what it has read
        with warnings.catch_warnings(), iterator.catch_stop_iteration():
            warnings.simplefilter("ignore")  # that the data have run out was said when they did
            for number, (first, last, batches) in enumerate(iterator.logged_steps(), start=1):
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


# What a backup asks


class FitData:
    """The data of one `fit`, and of its validations. It lives until the model's next `fit`, and keeps no data alive.

    Args:
        iterator: that of the data that are trained on.
    """

    def __init__(self, iterator: EpochIterator):
        self._iterator = weakref.ref(iterator)
        iterator.log = EpochLog()  # what was read before a restarted program reads again by itself
        self._validations: list[list[Any]] = []  # before this process began
        self._validated: EpochLog | None = None
        self._logs: Any = None
        self._say: Say = print

    @staticmethod
    @contextlib.contextmanager
    def noted(model: Any, iterator: EpochIterator) -> Iterator[None]:
        """Within it Keras looks at its `iterator`, of what `fit` of `model` is about to read, or a validation in it."""
        if iterator is not getattr(model, "_eval_epoch_iterator", None):
            yield
            vars(model)[_FIT] = FitData(iterator)
            return
        data = FitData.of(model)
        if data is not None:
            # To look may make an iterator, each time: so many are behind a validation.
            data._validated = iterator.log = iterator.log or EpochLog()
        yield
        if data is not None and data._validations:
            iterator.journey = _Journey(iterator, data._validations, 0, None, data._say, starts_anew=True).steps()
            data._validations = []

    @staticmethod
    def of(model: Any) -> "FitData | None":
        """Returns the data of the `fit` of `model` that runs, or ran last; None before the first under a tfdist strategy."""
        return vars(model).get(_FIT)

    @property
    def iterator(self) -> EpochIterator:
        """It lives as long as the `fit`."""
        return self._iterator()

    def _signature(self) -> Signature | None:
        dataset = self.iterator.given_dataset
        return None if dataset is None else dataset_signature(dataset)

    def unfindable(self) -> str:
        """Returns why the place in these data cannot be found by another process; "" where it can."""
        signature = self._signature()
        if signature is None or self.iterator.is_generator or self.iterator.is_py_dataset:
            return ""
        for found, why in ((unseeded(signature), "has no seed"), (unordered(signature), "yields its elements in any order")):
            if found:
                return f"{found[0]} {why}"
        return ""

    def state(self, batches: int) -> dict[str, Any]:
        """Returns the place behind `batches` of the epoch that runs, with 0 behind its end, as what JSON can carry."""
        signature, iterator = self._signature(), self.iterator
        position = {
            "epochs": iterator.log.past(with_current=batches == 0),
            "batches": batches,
            # Behind the end of an epoch the next one begins with what it has left.
            "random": iterator.random if batches or not iterator.is_py_dataset else random_states(),
            "signature": None if signature is None else json.dumps(signature),
        }
        over = self._validations if self._validated is None else self._validated.past(with_current=True)
        return {"position": position, "validations": over}

    def go_to(self, state: dict[str, Any], say: Say, is_chief: bool) -> None:
        """Lets training begin at the place of a backup's `state`, and validation behind the validations that are over.

        Args:
            state: what `state` has returned, with `logs`, those of the step before, which are the epoch's where no step is left
                in it, and with `stop_training`, whether the epoch ends at the place.
            say: called with lines for the user.
            is_chief: workers that read parts of their own have other data than the chief, whose state it is.

        Raises:
            ValueError: the place is in the middle of an epoch of other data.
        """
        position = state["position"]
        mine, theirs = self._signature(), position["signature"]
        different = mine and theirs and difference(mine, json.loads(theirs))
        if different and position["batches"] and is_chief:
            raise errors.value_error(
                f"The backup is of the middle of an epoch, and the data are not those of that epoch: {different} in the backup.",
                fix="Give `fit` the same data as before, made after the same `keras.utils.set_random_seed`, or remove "
                "`backup_dir`.",
            )
        if self.iterator.is_generator and is_chief:
            errors.warn(
                "`fit` goes on from a backup, and its data are a Python generator, of which the place cannot be known: batches "
                "that were read before the failure are read and dropped, which is right if the generator yields the same again. "
                "A `tf.data.Dataset` or a `keras.utils.PyDataset` goes on at its place for certain."
            )
        self._validations, self._logs, self._say = state["validations"], state["logs"], say
        batches = None if state["stop_training"] and position["batches"] else position["batches"]
        self.iterator.journey = _Journey(self.iterator, position["epochs"], batches, position["random"], say).steps()

    def logs(self, logs: Any) -> Any:
        """Returns the logs of the last step of an epoch: `logs`, or, where an epoch went on behind its last step, what it had."""
        before, self._logs = self._logs, None
        return logs or before or logs
