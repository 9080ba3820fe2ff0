"""`BackupAndRestore` under a tfdist strategy: the chief writes a backup, and all workers train on from the same one.

Note: one file. Keras writes the weights, then the epoch into another file; killed in between, a run starts again with weights
that are an epoch ahead. Here the epoch stands also in the weights file, as the attribute `tfdist_training_state`, and what
stands there is what counts; Keras without tfdist reads its own file and ignores the attribute, so it still has that window.
A remote `backup_dir` (gs://) has it too: there the files are written as Keras writes them.

Functions here take the callback, and the strategy under which its model was made; one worker is its own chief.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from typing import Any

import h5py
from keras.src.utils import file_utils

from tfdist import errors
from tfdist.checkpoint.saving import save_backup
from tfdist.checkpoint.staging import staged
from tfdist.checkpoint.writing_role import all_workers_inside, chief_decides, is_chief

_STATE = "tfdist_training_state"


def restore(callback: Any, strategy: Any) -> None:
    """Restores the backup that the chief can read, the latest or else the one before, on all workers."""
    error = None
    try:
        callback._load_model()
    except OSError as unreadable:
        error = unreadable
    if chief_decides(strategy, "BackupAndRestore/readable", error is None):
        if error is not None:
            raise error
        return
    with all_workers_inside(strategy, "BackupAndRestore/previous"):
        brought_back = is_chief(strategy) and _bring_back_previous(callback)
    if not chief_decides(strategy, "BackupAndRestore/brought_back", brought_back):
        raise error or OSError(f"The chief cannot read the backup {callback._weights_path}, and there is no previous one.")
    callback._load_model()


def _bring_back_previous(callback: Any) -> bool:
    """Puts the previous backup in the place of the latest; returns whether there is one."""
    if not file_utils.exists(callback._prev_weights_path):
        return False
    file_utils.copy(callback._prev_weights_path, callback._weights_path)
    if file_utils.exists(callback._prev_training_metadata_path):
        file_utils.copy(callback._prev_training_metadata_path, callback._training_metadata_path)
    elif file_utils.exists(callback._training_metadata_path):
        file_utils.remove(callback._training_metadata_path)
    return True


def load(callback: Any, strategy: Any, load_weights: Callable[[], None]) -> None:
    """Loads the backup, by `load_weights()`, when all workers see the one that the chief sees."""
    # The readers look when the chief has looked: it is not changing anything then.
    seen = json.dumps(_backup(callback)) if is_chief(strategy) else ""
    seen_by_chief = strategy.share("BackupAndRestore/found", seen)
    backup = json.loads(seen_by_chief)
    if not is_chief(strategy) and (mine := _backup(callback)) != backup:
        raise errors.runtime_error(
            "`backup_dir` must be on a file system that all workers share: the chief found another backup there, "
            f"{backup} instead of {mine}.",
            backup_dir=str(callback.backup_dir),
            fix="Give all workers the same directory of a shared file system.",
        )
    load_weights()
    if backup["state"] is not None:
        callback.model._initial_epoch = backup["state"]["epoch"]


def _backup(callback: Any) -> dict[str, Any]:
    """Returns what lies in the backup directory: whether weights, and the state of training that they belong to."""
    found = {"weights": file_utils.exists(callback._weights_path), "state": None}
    if found["weights"] and not file_utils.is_remote_path(callback._weights_path):
        try:
            with h5py.File(callback._weights_path, "r") as file:
                found["state"] = json.loads(file.attrs.get(_STATE, "null"))
        except OSError:
            pass  # no HDF5 file: loading it says so
    if found["state"] is None and file_utils.exists(callback._training_metadata_path):
        with file_utils.File(callback._training_metadata_path, "r") as file:
            found["state"] = json.loads(file.read())
    return found


def write(callback: Any) -> None:
    """Writes weights and state of training, in one file that is replaced atomically."""
    if callback.double_checkpoint:
        for latest, previous in (
            (callback._weights_path, callback._prev_weights_path),
            (callback._training_metadata_path, callback._prev_training_metadata_path),
        ):
            if os.path.exists(latest):
                shutil.copy(latest, previous)
    state = json.dumps({"epoch": callback._current_epoch, "batch": callback._last_batch_seen})
    save_backup(callback.model, callback._weights_path, lambda file: file.attrs.create(_STATE, state))
    with staged(callback._training_metadata_path) as path, open(path, "w", encoding="utf-8") as file:
        file.write(state)


def remove(strategy: Any, remove_files: Callable[[], None]) -> None:
    """Removes the backup, by `remove_files()` on the chief. A run with no epochs left comes here while others still load."""
    with all_workers_inside(strategy, "BackupAndRestore/remove"):
        if is_chief(strategy):
            remove_files()
