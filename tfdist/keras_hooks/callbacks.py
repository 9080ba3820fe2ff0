"""Callbacks: under several workers all join in reading the model, and the chief alone makes, replaces and removes files.

Each worker must be given the same callbacks. The mistake to avoid: a callback for the chief alone, which waits for the others for
ever. `TensorBoard` is left alone: the event files of two workers differ in name, so they may share a directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from keras.src.utils import file_utils

from tfdist import errors
from tfdist.checkpoint import WritingRole, backups, chief_decides, cluster_strategy, tfdist_strategy, writing_role
from tfdist.keras_hooks.table import replaces
from tfdist.sharding import config_of

_CHECKPOINT, _BACKUP, _CSV = (f"keras.callbacks.{name}" for name in ("ModelCheckpoint", "BackupAndRestore", "CSVLogger"))


@replaces(_CHECKPOINT, "_should_save_model")
def _should_save(original: Callable[..., bool], self: Any, epoch: int, batch: Any, logs: Any, filepath: str) -> bool:
    """Each worker would decide for itself whether this epoch is the best; saving needs all of them."""
    wanted = original(self, epoch, batch, logs, filepath)
    strategy = cluster_strategy(self.model)
    return wanted if strategy is None else chief_decides(strategy, "ModelCheckpoint", wanted)


@replaces(_CHECKPOINT, "_get_file_path")
def _checkpoint_path(original: Callable[..., str], self: Any, epoch: int, batch: Any, logs: Any) -> str:
    """Keras makes the directory of the path, on workers too that write nothing."""
    path = original(self, epoch, batch, logs)
    return os.path.basename(path) if writing_role(self.model) is WritingRole.READER else path


@replaces(_BACKUP, "on_train_begin")
def _restore(original: Callable[..., None], self: Any, logs: Any = None) -> None:
    """Each worker would decide for itself which backup is whole, and copy it."""
    strategy = tfdist_strategy(self.model)
    if strategy is None:
        original(self, logs)
    else:
        backups.restore(self, strategy)


@replaces(_BACKUP, "_load_model")
def _load_backup(original: Callable[..., None], self: Any) -> None:
    """Workers that see different backups would train on from different epochs."""
    strategy = tfdist_strategy(self.model)
    if strategy is None:
        original(self)
    else:
        backups.load(self, strategy, lambda: original(self))


@replaces(_BACKUP, "_save_model")
def _save_backup(original: Callable[..., None], self: Any) -> None:
    """Every worker would write the same files; and Keras writes weights and epoch one after the other, so that a worker that is
    killed in between leaves a backup that is an epoch ahead."""
    role = writing_role(self.model)
    if role is WritingRole.READER:
        self.model.save_weights(self._weights_path, overwrite=True)
    elif role is WritingRole.ALONE or file_utils.is_remote_path(self.backup_dir):
        original(self)
    else:
        backups.write(self)


@replaces(_BACKUP, "on_train_end")
def _remove_backup(original: Callable[..., None], self: Any, logs: Any = None) -> None:
    """Every worker would remove the directory, while others may still read it."""
    strategy = tfdist_strategy(self.model)
    if strategy is None:
        original(self, logs)
    else:
        backups.remove(strategy, lambda: original(self, logs))


@replaces(_CSV, "on_train_begin", signature="(self, logs=None)")
@replaces(_CSV, "on_epoch_end", signature="(self, epoch, logs=None)")
@replaces(_CSV, "on_train_end", signature="(self, logs=None)")
def _log(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Every worker would write the same file."""
    if writing_role(self.model) is not WritingRole.READER:
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
