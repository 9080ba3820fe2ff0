"""What one `fit` reads, as its backup sees it: where it is, and what leads another process there."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.data import position

_ATTRIBUTE = "_tfdist_fit_data"


class FitData:
    """The data of one `fit`, and of its validations. It lives until the model's next `fit`, and keeps no data alive.

    Args:
        iterator: Keras's `EpochIterator` of the data that are trained on.
    """

    def __init__(self, iterator: Any):
        self._iterator = weakref.ref(iterator)
        self._validations: list[list[Any]] = []
        self._validating: Any = None
        self._logs: Any = None
        self._say: Callable[[str], None] = print

    @staticmethod
    @contextlib.contextmanager
    def noted(model: Any, iterator: Any) -> Iterator[None]:
        """Within it Keras looks at its `iterator`, of what `fit` of `model` is about to read, or a validation in it."""
        data = FitData.of(model)
        if iterator is not getattr(model, "_eval_epoch_iterator", None):
            yield
            vars(model)[_ATTRIBUTE] = FitData(iterator)
        elif data is None:
            yield
        else:
            # To look may make an iterator, each time: so many iterators are behind a validation.
            position.log_of(iterator)
            yield
            data._validate(iterator)

    @staticmethod
    def of(model: Any) -> FitData | None:
        """Returns the data of the `fit` of `model` that runs, or ran last; None before the first under a tfdist strategy."""
        return vars(model).get(_ATTRIBUTE)

    @property
    def iterator(self) -> Any:
        """Keras's `EpochIterator`; it lives as long as the `fit`."""
        return self._iterator()

    def begin(self) -> None:
        """Tells that training begins: what was read before a restarted program reads again by itself."""
        position.log_of(self.iterator)

    def unfindable(self) -> str:
        """Returns why no other process finds a place in these data; "" where one does."""
        return position.unfindable(self.iterator)

    def position(self, batches: int) -> dict[str, Any]:
        """Returns the place behind `batches` of the epoch that runs; with 0, behind its end."""
        return position.position_of(self.iterator, batches)

    def go_to(
        self,
        place: dict[str, Any],
        validations: list[list[Any]],
        logs: Any,
        say: Callable[[str], None],
        ends: bool,
        is_chief: bool,
    ) -> None:
        """Lets training begin at `place`, and validation behind `validations`.

        Args:
            logs: those of the step before: of the epoch, where no step is left in it.
            say: called with lines for the user.
            ends: whether the epoch ends at `place`.

        Raises:
            ValueError: `place` is in the middle of an epoch of other data.
        """
        if place["batches"] and is_chief:  # workers that read parts of their own have others than the chief
            position.check_same_data(self.iterator, place)
        if position.is_generator(self.iterator) and is_chief:
            warnings.warn(
                "`fit` goes on from a backup, and its data are a Python generator, of which the place cannot be known: batches "
                "that were read before the failure are read and dropped, which is right if the generator yields the same again. "
                "A `tf.data.Dataset` or a `keras.utils.PyDataset` goes on at its place for certain.",
                stacklevel=2,
            )
        self._validations, self._logs, self._say = validations, logs, say
        position.go_to(self.iterator, {**place, "ends": ends and place["batches"] > 0}, say)

    def validations(self) -> list[list[Any]]:
        """Returns the validations that are over, as runs of [number, how they ended]."""
        iterator = None if self._validating is None else self._validating()
        return self._validations if iterator is None else position.log_of(iterator).past(with_current=True)

    def _validate(self, iterator: Any) -> None:
        self._validating = weakref.ref(iterator)
        if self._validations:
            place = {"epochs": self._validations, "batches": 0, "random": None}
            position.go_to(iterator, place, self._say, starts_anew=True)
            self._validations = []

    def logs(self, logs: Any) -> Any:
        """Returns the logs of the last step of an epoch: `logs`, or, where an epoch went on behind its last step, what it had."""
        before, self._logs = self._logs, None
        return logs or before or logs
