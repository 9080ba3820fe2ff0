"""Where Keras's callbacks touch files, and every worker would touch the same ones: the methods that tfdist overrides.

Under a strategy over several workers each of them must be given the same callbacks: all join the reading of variables
(`keras_saving`), and only the chief makes, copies, replaces and removes files. The mistake to avoid: a callback for the chief
alone, which waits for the others for ever.

Every override looks at the model's strategy first and falls through, untouched, for all but tfdist's over several workers.
The names are private to Keras: tests/checkpoint/test_private_names_of_saving.py fails when they change.

    ModelCheckpoint     _should_save_model    the chief decides whether this epoch is the best
                        _get_file_path        without its directory on readers, which Keras would make
    BackupAndRestore    on_train_begin        the chief decides which backup is whole, and copies it
                        _load_model           all must see the backup that the chief sees
                        _save_model           weights and epoch in one file, replaced atomically
                        on_train_end          the chief removes the directory
    CSVLogger           on_...                the chief writes
    OrbaxCheckpoint     set_model             refused

`TensorBoard` is left alone: the event files of two workers differ in name, so they may share a directory.

Note: one file. Keras writes the weights, then the epoch into another file; killed in between, a run starts again with weights
that are an epoch ahead. Here the epoch stands also in the weights file, as the attribute `tfdist_training_state`, and what
stands there is what counts; Keras without tfdist reads its own file and ignores the attribute, so it still has that window.
A remote `backup_dir` (gs://) has it too: there the files are written as Keras writes them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from typing import Any

import h5py
from keras.callbacks import BackupAndRestore, CSVLogger, ModelCheckpoint, OrbaxCheckpoint
from keras.src.utils import file_utils

from tfdist import errors
from tfdist.checkpoint.staging import staged
from tfdist.checkpoint.writing_role import WritingRole, all_workers_inside, chief_decides, cluster_strategy, writing_role
from tfdist.override import override

_STATE = "tfdist_training_state"


@override("_should_save_model", ModelCheckpoint)
def _should_save(original: Callable[..., bool], self: Any, *args: Any, **kwargs: Any) -> bool:
    wanted = original(self, *args, **kwargs)
    strategy = cluster_strategy(self.model)
    return wanted if strategy is None else chief_decides(strategy, "ModelCheckpoint", wanted)


@override("_get_file_path", ModelCheckpoint)
def _checkpoint_path(original: Callable[..., str], self: Any, *args: Any, **kwargs: Any) -> str:
    path = original(self, *args, **kwargs)
    return os.path.basename(path) if writing_role(self.model) is WritingRole.READER else path


@override("on_train_begin", BackupAndRestore)
def _restore(original: Callable[..., None], self: Any, logs: Any = None) -> None:
    strategy = cluster_strategy(self.model)
    if strategy is None:
        original(self, logs)
        return
    error = None
    try:
        self._load_model()
    except OSError as unreadable:
        error = unreadable
    if chief_decides(strategy, "BackupAndRestore/readable", error is None):
        if error is not None:
            raise error
        return
    with all_workers_inside(strategy, "BackupAndRestore/previous"):
        brought_back = strategy.cluster.is_chief and _bring_back_previous(self)
    if not chief_decides(strategy, "BackupAndRestore/brought_back", brought_back):
        raise error or OSError(f"The chief cannot read the backup {self._weights_path}, and there is no previous one.")
    self._load_model()


def _bring_back_previous(self: Any) -> bool:
    """Puts the previous backup in the place of the latest; returns whether there is one."""
    if not file_utils.exists(self._prev_weights_path):
        return False
    file_utils.copy(self._prev_weights_path, self._weights_path)
    if file_utils.exists(self._prev_training_metadata_path):
        file_utils.copy(self._prev_training_metadata_path, self._training_metadata_path)
    elif file_utils.exists(self._training_metadata_path):
        file_utils.remove(self._training_metadata_path)
    return True


@override("_load_model", BackupAndRestore)
def _load_backup(original: Callable[..., None], self: Any) -> None:
    strategy = cluster_strategy(self.model)
    if strategy is None:
        original(self)
        return
    # The readers look when the chief has looked: it is not changing anything then.
    seen = json.dumps(_backup(self)) if strategy.cluster.is_chief else ""
    seen_by_chief = strategy.share("BackupAndRestore/found", seen)
    backup = json.loads(seen_by_chief)
    if not strategy.cluster.is_chief and (mine := _backup(self)) != backup:
        raise RuntimeError(
            errors.message(
                "`backup_dir` must be on a file system that all workers share: the chief found another backup there, "
                f"{backup} instead of {mine}.",
                backup_dir=str(self.backup_dir),
                fix="Give all workers the same directory of a shared file system.",
            )
        )
    original(self)
    if backup["state"] is not None:
        self.model._initial_epoch = backup["state"]["epoch"]


def _backup(self: Any) -> dict[str, Any]:
    """Returns what lies in the backup directory: whether weights, and the state of training that they belong to."""
    found = {"weights": file_utils.exists(self._weights_path), "state": None}
    if found["weights"] and not file_utils.is_remote_path(self._weights_path):
        try:
            with h5py.File(self._weights_path, "r") as file:
                found["state"] = json.loads(file.attrs.get(_STATE, "null"))
        except OSError:
            pass  # no HDF5 file: loading it says so
    if found["state"] is None and file_utils.exists(self._training_metadata_path):
        with file_utils.File(self._training_metadata_path, "r") as file:
            found["state"] = json.loads(file.read())
    return found


@override("_save_model", BackupAndRestore)
def _save_backup(original: Callable[..., None], self: Any) -> None:
    role = writing_role(self.model)
    if role is WritingRole.READER:
        self.model.save_weights(self._weights_path, overwrite=True)
    elif role is WritingRole.ALONE or file_utils.is_remote_path(self.backup_dir):
        original(self)
    else:
        _write_backup(self)


def _write_backup(self: Any) -> None:
    os.makedirs(self.backup_dir, exist_ok=True)
    if self.double_checkpoint:
        for latest, previous in (
            (self._weights_path, self._prev_weights_path),
            (self._training_metadata_path, self._prev_training_metadata_path),
        ):
            if os.path.exists(latest):
                shutil.copy(latest, previous)
    state = json.dumps({"epoch": self._current_epoch, "batch": self._last_batch_seen})
    with staged(self._weights_path) as path:
        self.model.save_weights(path, overwrite=True)
        with h5py.File(path, "r+") as file:
            file.attrs[_STATE] = state
    with staged(self._training_metadata_path) as path, open(path, "w", encoding="utf-8") as file:
        file.write(state)


@override("on_train_end", BackupAndRestore)
def _remove_backup(original: Callable[..., None], self: Any, logs: Any = None) -> None:
    strategy = cluster_strategy(self.model)
    if strategy is None:
        original(self, logs)
        return
    # A run with no epochs left comes here while others may still load.
    with all_workers_inside(strategy, "BackupAndRestore/remove"):
        if strategy.cluster.is_chief:
            original(self, logs)


@override("on_train_begin", CSVLogger)
@override("on_epoch_end", CSVLogger)
@override("on_train_end", CSVLogger)
def _log(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    if writing_role(self.model) is not WritingRole.READER:
        original(self, *args, **kwargs)


@override("set_model", OrbaxCheckpoint)
def _refuse_orbax(original: Callable[..., None], self: Any, model: Any) -> None:
    if writing_role(model) is not WritingRole.ALONE:
        raise NotImplementedError(
            errors.message(
                "`OrbaxCheckpoint` is not supported under a tfdist strategy over several workers: each worker would write the "
                "same files.",
                directory=str(self.directory),
                fix="Use `ModelCheckpoint` or `BackupAndRestore`.",
            )
        )
    original(self, model)
