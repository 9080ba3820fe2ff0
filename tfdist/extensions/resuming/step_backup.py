"""Backups of steps: what a `FitBackup` has and restores, besides, to go on in the middle of an epoch.

before other callbacks begin        the place in the data
after they have begun an epoch      metrics, which `fit` has emptied, and learning rates, which a scheduler has set twice
after they have ended a step        a backup is written: so it has what they have done
"""

import weakref
from collections.abc import Callable
from typing import Any

from tfdist.checkpoint import FitBackup
from tfdist.checkpoint.backup_file import read_arrays
from tfdist.checkpoint.extra_state import metrics_state, restore_extra_state, restore_metrics_state
from tfdist.extensions.resuming.position import EpochLog, Epochs, PositionedIterator
from tfdist.keras_hooks.table import TRAINER, replaces
from tfdist.keras_hooks.trainer import build_for_backup

_LOGS = "_tfdist_logs"  # an attribute of a model


class StepBackup(FitBackup):
    """A `FitBackup` of the very step, where the place in the data can be found again."""

    def _restore(self, strategy: Any, iterator: PositionedIterator, callbacks: Any) -> None:
        iterator.log = EpochLog()  # what was read before a restarted program reads again by itself
        self._iterator = weakref.ref(iterator)  # keeps no data alive
        self._batches, self._logs = 0, dict[str, Any]()  # what the epoch has had
        self._validations: Epochs = []  # that were over before this process began
        super()._restore(strategy, iterator, callbacks)

    def _unfindable(self) -> str:
        return self._iterator().unfindable()

    def _go_to(self, state: dict[str, Any]) -> None:
        position = state["position"]
        if self._is_chief:  # workers that read parts of their own have other data
            self._iterator().check(position)
        is_at_end = state["stop_training"] and state["batch"]
        self._iterator().go_to({**position, "batches": None} if is_at_end else position, self._say)
        self._batches, self._validations = state["batch"], state["validations"]
        self._rates = [(v, v.numpy()) for v in getattr(self.model.optimizer, "variables", ()) if v.name == "learning_rate"]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restores, where an epoch goes on in its middle, what its beginning has changed; other callbacks have begun it."""
        restored = self._restored
        super().on_epoch_begin(epoch, logs)
        if restored is None or not restored["batch"] or "position" not in restored:
            return
        self._last_batch_seen = restored["batch"] - 1
        self.model.stop_training = restored["stop_training"]
        self.model.__dict__[_LOGS] = restored["logs"]
        for variable, value in self._rates:
            variable.assign(value)
        restore_extra_state(self.model, read_arrays(self._path, "extra"))
        if any(not getattr(metric, "built", True) for metric in self.model.metrics):
            build_for_backup(self.model, self._iterator())
        restore_metrics_state(self.model, read_arrays(self._path, "metrics"))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """`batch` is the last one of an execution."""
        self._batches, self._logs = batch + 1, dict(logs or {})
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._batches, self._logs = 0, {}
        super().on_epoch_end(epoch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Lets the first validation begin after those that are over."""
        over, self._validations = self._validations, []
        if over:
            self.model._eval_epoch_iterator.go_to({"epochs": over, "batches": 0, "random": None}, self._say, starts_anew=True)

    def _write(self, path: str, more: dict[str, Any], **arrays: Any) -> dict[str, Any]:
        validated = getattr(self.model, "_eval_epoch_iterator", None)
        place = {
            "batch": self._batches,
            "position": self._iterator().position(self._batches),
            # A look at the data may make an iterator, in each validation: it is in the log, too.
            "validations": self._validations if validated is None else validated.log.past(with_current=True),
            "logs": self._logs,
        }
        if self._batches:
            arrays["metrics"] = metrics_state(self.model)
        return super()._write(path, {**place, **more}, **arrays)


@replaces(TRAINER, "_get_metrics_result_or_logs")
def _logs_of_epoch(original: Callable[..., Any], self: Any, logs: Any) -> Any:
    """An epoch that goes on from a backup after its last step has no step whose logs Keras could take."""
    before = vars(self).pop(_LOGS, None)
    return original(self, logs or before or logs)
