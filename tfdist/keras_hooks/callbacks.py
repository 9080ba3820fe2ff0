"""Callbacks: under several workers all join in reading the model, and the chief alone makes, replaces and removes files.

Each worker must be given the same callbacks. The mistake to avoid: a callback for the chief alone, which waits for the others for
ever. `TensorBoard` is left alone: the event files of two workers differ in name, so they may share a directory.
"""

import os
from collections.abc import Callable
from typing import Any

import keras

from tfdist import errors
from tfdist.checkpoint import BACKUP, chief_decides, is_chief, tfdist_strategy
from tfdist.keras_hooks.table import replaces
from tfdist.keras_hooks.trainer import ITERATOR, build_for_backup
from tfdist.sharding import config_of

_CHECKPOINT, _CSV = "keras.callbacks.ModelCheckpoint", "keras.callbacks.CSVLogger"


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


@replaces("keras.callbacks.CallbackList", "on_train_begin")
def _begin_training(original: Callable[..., None], self: Any, logs: Any = None) -> None:
    """`BackupAndRestore` goes on from the beginning of an epoch, with weights that may have had its first steps. It has what
    callbacks before it in the list have done, and not what those after it have. Each worker would write and remove the same
    files, while others read them. So it becomes a `FitBackup`, which restores before the others begin, and is called last."""
    for callback in [one for one in self.callbacks if isinstance(one, keras.callbacks.BackupAndRestore)]:
        BACKUP.now.leave(callback)
        strategy = tfdist_strategy(callback.model)
        if strategy is not None:
            self.callbacks.remove(callback)
            self.callbacks.append(callback)
            iterator = vars(callback.model)[ITERATOR]()
            if not all(layer.built for layer in callback.model._flatten_layers(include_self=True)):
                build_for_backup(callback.model, iterator)
            BACKUP.now.begin(callback, strategy, iterator, self.callbacks)
    original(self, logs)


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
