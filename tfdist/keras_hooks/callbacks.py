"""Callbacks: under several workers all join in reading the model, and the chief alone makes, replaces and removes files.

Each worker must be given the same callbacks. The mistake to avoid: a callback for the chief alone, which waits for the others for
ever. `TensorBoard` is left alone: the event files of two workers differ in name, so they may share a directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras

from tfdist import errors
from tfdist.checkpoint import FitBackup, chief_decides, is_chief, keep_rows_before, tfdist_strategy
from tfdist.data import FitData
from tfdist.keras_hooks.table import replaces
from tfdist.keras_hooks.trainer import build_for_backup
from tfdist.sharding import config_of

_CHECKPOINT, _BACKUP, _CSV = (f"keras.callbacks.{name}" for name in ("ModelCheckpoint", "BackupAndRestore", "CSVLogger"))


@replaces(_CHECKPOINT, "_should_save_model")
def _should_save(original: Callable[..., bool], self: Any, epoch: int, batch: Any, logs: Any, filepath: str) -> bool:
    """Each worker would decide for itself whether this epoch is the best; saving needs all of them."""
    wanted = original(self, epoch, batch, logs, filepath)
    strategy = tfdist_strategy(self.model)
    return wanted if strategy is None else chief_decides(strategy, "ModelCheckpoint", wanted)


@replaces(_CHECKPOINT, "_get_file_path")
def _checkpoint_path(original: Callable[..., str], self: Any, epoch: int, batch: Any, logs: Any) -> str:
    """Keras makes the directory of the path, on workers too that write nothing."""
    path = original(self, epoch, batch, logs)
    return path if is_chief(tfdist_strategy(self.model)) else os.path.basename(path)


# A backup must have what the other callbacks have done, and they begin with what is restored: wherever it stands in the list, it
# restores before they begin, and is called after them from then on.
_LIST = "keras.callbacks.CallbackList"
_FIT = "_tfdist_fit"


def _fit_of(callback: Any) -> FitBackup | None:
    return vars(callback).get(_FIT)


@replaces(_LIST, "on_train_begin")
def _begin_training(original: Callable[..., None], self: Any, logs: Any = None) -> None:
    """`BackupAndRestore` goes on from the beginning of an epoch, with what callbacks before it in the list have done and without
    what those behind it have; what it restores is not there yet when those before it begin."""
    backups = [callback for callback in self.callbacks if isinstance(callback, keras.callbacks.BackupAndRestore)]
    for callback in backups:
        vars(callback).pop(_FIT, None)
        strategy = tfdist_strategy(callback.model)
        if strategy is not None:
            self.callbacks.remove(callback)
            self.callbacks.append(callback)
            fit = FitBackup(callback, strategy, FitData.of(callback.model), self.callbacks, build_for_backup)
            vars(callback)[_FIT] = fit
            fit.restore()
            if fit.goes_on and is_chief(strategy):
                _keep_rows(self.callbacks, callback.model._initial_epoch or 0)
    original(self, logs)


def _keep_rows(callbacks: list[Any], epoch: int) -> None:
    """Has `CSVLogger` write behind the rows of the epochs that are over, of which a run that goes on writes none."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            keep_rows_before(callback, epoch)
            callback.append = True


@replaces(_BACKUP, "on_train_begin")
def _restore(original: Callable[..., None], self: Any, logs: Any = None) -> None:
    """Each worker would decide for itself which backup is whole, and copy it."""
    fit = _fit_of(self)
    if fit is None:
        original(self, logs)
    else:
        fit.restore_callbacks()


@replaces(_BACKUP, "on_epoch_begin")
def _begin_epoch(original: Callable[..., None], self: Any, epoch: int, logs: Any = None) -> None:
    """In the first epoch behind a restart Keras takes its number for 0: a second failure would go back to that."""
    original(self, epoch, logs)
    fit = _fit_of(self)
    if fit is not None:
        fit.begin_epoch(epoch)


@replaces(_BACKUP, "on_train_batch_end")
def _end_step(original: Callable[..., None], self: Any, batch: int, logs: Any = None) -> None:
    """Keras goes on from the beginning of the epoch, with weights that have had its first steps."""
    fit = _fit_of(self)
    if fit is not None:
        fit.end_batches(batch, logs)
        if not fit.finds_steps:
            return
    original(self, batch, logs)


@replaces(_BACKUP, "on_epoch_end")
def _end_epoch(original: Callable[..., None], self: Any, epoch: int, logs: Any = None) -> None:
    """Where no place in the middle of an epoch can be found again, backups are of the ends of epochs, whatever `save_freq` is."""
    fit = _fit_of(self)
    if fit is not None:
        fit.end_epoch(epoch)
    original(self, epoch, logs)
    if fit is not None and not fit.finds_steps and self.save_freq != "epoch":
        self._save_model()


@replaces(_BACKUP, "_save_model")
def _save_backup(original: Callable[..., None], self: Any) -> None:
    """Every worker would write the same files; and Keras writes weights and epoch one after the other, so that a worker that is
    killed in between leaves a backup that is an epoch ahead."""
    fit = _fit_of(self)
    if fit is None:
        original(self)
    else:
        fit.write()


@replaces(_BACKUP, "on_train_end")
def _remove_backup(original: Callable[..., None], self: Any, logs: Any = None) -> None:
    """Every worker would remove the directory, while others may still read it; and a restart behind the end trains again."""
    fit = vars(self).pop(_FIT, None)
    if fit is None:
        original(self, logs)
    else:
        fit.end()


@replaces(_CSV, "on_train_begin", signature="(self, logs=None)")
@replaces(_CSV, "on_epoch_end", signature="(self, epoch, logs=None)")
@replaces(_CSV, "on_train_end", signature="(self, logs=None)")
def _log(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Every worker would write the same file."""
    if is_chief(tfdist_strategy(self.model)):
        original(self, *args, **kwargs)


@replaces("keras.callbacks.OrbaxCheckpoint", "set_model")
def _refuse_orbax(original: Callable[..., None], self: Any, model: Any) -> None:
    """Orbax does not know variables of a strategy: with TensorFlow's it saves what it cannot load, without a word."""
    if config_of(getattr(model, "_distribute_strategy", None)) is not None:
        raise errors.not_implemented(
            "`OrbaxCheckpoint` is not supported under a tfdist strategy: what it saves is not loaded into TensorFlow's "
            "variables, which keep their initial values.",
            directory=str(self.directory),
            fix="Use `keras.callbacks.ModelCheckpoint`, or `keras.callbacks.BackupAndRestore` for a run that goes on.",
        )
    original(self, model)
