"""`BackupAndRestore` under a tfdist strategy: a `fit` that goes on with the epoch after the last one, over workers too.

The chief writes a backup, and all train on from the same one. What is restored when:

    before other callbacks begin        weights and the optimizer's state, arrays of seeds and the like; `fit` is told the epoch
    after they have begun               what Keras's callbacks know in Python: beginning has emptied it
    after they have ended an epoch      a backup is written: so it has what they have done

Note: several `fit` into one directory. Each has a number, counted by the process; a backup knows that of its own. When a program
is started again, a `fit` with a smaller number than that of the backup is over, and is passed by.

Note: a `fit` that is over. Keras removes the backup at its end; a program that is killed later would train again. Where it is
known which job this is (`runtime.this_run`) a mark is left, `finished-<number>.weights.h5`, a backup of the end. A restart of the
job passes by what has a mark, with its weights and its history; another run of the program removes the marks, and trains.
"""

import collections
import dataclasses
import glob
import itertools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
from keras.src.utils import file_utils, io_utils

from tfdist import errors
from tfdist.checkpoint import backup_file
from tfdist.checkpoint.callback_states import callback_states, restore_callback_states
from tfdist.checkpoint.extra_state import build_optimizers, extra_state, restore_extra_state, trained_variables
from tfdist.checkpoint.saving import write_on_chief
from tfdist.checkpoint.staging import copy_file, write_bytes
from tfdist.checkpoint.unsaved import note_optimizers
from tfdist.checkpoint.writing_role import all_workers_inside, is_chief
from tfdist.extensible import Place
from tfdist.runtime import random_states, remove_after_success, set_random_states, this_run

State = dict[str, Any]


class FitBackup(keras.callbacks.BackupAndRestore):
    """A `BackupAndRestore` in one `fit`: what is found when it begins, written while it runs, and left at its end.

    Backups are of the ends of epochs, and an epoch begins with the first batch of its data, as with Keras's own.
    `begin` makes one of a callback, and `leave` makes it what it was. With Keras's methods each worker would decide for itself
    which backup is whole, and all would write and remove the same files. All methods are called by all workers at once.
    """

    # How many `fit` this process has ended, by directory.
    _ended: collections.Counter[str] = collections.Counter()

    @classmethod
    def begin(cls, callback: Any, strategy: Any, iterator: Any, callbacks: Sequence[Any]) -> None:
        """Makes `callback` a `FitBackup`, and restores what is found, before the other callbacks begin.

        Args:
            callback: a `BackupAndRestore`, maybe of a class of the user's, whose own methods come first.
            strategy: the tfdist strategy of its model.
            iterator: the `data.EpochIterator` of the data that `fit` trains on.
            callbacks: all callbacks of this `fit`.
        """
        kind = callback._kind = type(callback)
        is_kerass = kind is keras.callbacks.BackupAndRestore
        callback.__class__ = cls if is_kerass else type(kind.__name__, (kind, cls), {})
        callback._restore(strategy, iterator, callbacks)

    @staticmethod
    def leave(callback: Any) -> None:
        """Makes `callback` what it was before `begin`; of a `fit` that has failed nobody else does."""
        if isinstance(callback, FitBackup):
            callback.__class__ = callback._kind

    def _share(self, name: str, value: Any) -> Any:
        return json.loads(self._strategy.share(f"BackupAndRestore/{name}", json.dumps(value) if self._is_chief else ""))

    def _on_chief(self, name: str, action: Callable[[], Any]) -> Any:
        """Has the chief do what changes files, while no worker reads them; returns what it returns on every worker."""
        with all_workers_inside(self._strategy, f"BackupAndRestore/{name}"):
            return self._share(name, action() if self._is_chief else None)

    def _say(self, line: str) -> None:
        if self._is_chief:
            io_utils.print_msg(f"tfdist: {line}")

    # Beginning

    def _restore(self, strategy: Any, iterator: Any, callbacks: Sequence[Any]) -> None:
        self._strategy, self._callbacks = strategy, callbacks
        self._directory = str(self.backup_dir)
        self._key = self._directory if file_utils.is_remote_path(self._directory) else os.path.abspath(self._directory)
        self._number = self._ended[self._key]
        self._mark = file_utils.join(self._directory, f"finished-{self._number}.weights.h5")
        # The latest and the previous file of the weights, and those of Keras's metadata.
        metadata = self._training_metadata_path, self._prev_training_metadata_path
        self._files = (self._weights_path, self._prev_weights_path), metadata
        self._is_chief = is_chief(strategy)
        self._current_epoch = 0
        self._restored: State | None = None
        self._path = ""
        self._finds_steps = True  # whether a backup may be of the middle of an epoch
        self.model._initial_epoch = None  # Keras keeps it for the next `fit`
        note_optimizers(self.model)
        self._check_data()
        self._variables = len(self.model.variables)
        found = self._on_chief("found", self._find)
        for line in found["lines"]:
            self._say(line)
        self._check_is_shared(found)
        if found["path"] is not None:
            self._go_on(found["path"], found["state"], found["is_over"])
            if self._is_chief:
                _keep_rows_before(callbacks, self.model._initial_epoch or 0)

    def _check_data(self) -> None:
        """Says so where no place in the middle of an epoch can be found again."""
        if self.save_freq == "epoch":
            return
        if file_utils.is_remote_path(self._directory):
            why = f"{self._directory} is a remote folder, in which only weights and epoch are kept."
        else:
            why = self._share("data", self._unfindable())
        self._finds_steps = not why
        if why and self._is_chief:
            errors.warn(f"`BackupAndRestore(save_freq={self.save_freq})` saves at the end of each epoch only: {why}")

    def _unfindable(self) -> str:
        """Returns why no place in the middle of an epoch is found again; "" if one is."""
        return "`tfdist.extensions.resuming`, which goes on in the middle of one, is not installed."

    def _find(self) -> State:
        """Returns what this `fit` begins with: the path of a file, if there is any, its state, and lines for the user."""
        latest, previous, lines = self._weights_path, self._prev_weights_path, []
        state, torn = backup_file.read(latest)
        if torn:
            lines.append(f"the backup {latest} cannot be read: {torn}")
            if not file_utils.exists(previous):
                lines[-1] += "; there is none before it, and training begins anew"
            elif why := backup_file.read(previous)[1]:
                lines[-1] += f"; nor can the one before it: {why}; training begins anew"
            else:
                lines[-1] += "; the one before it is taken"
                for newer, older in self._files:
                    if file_utils.exists(older):
                        file_utils.copy(older, newer)
                    elif file_utils.exists(newer):
                        file_utils.remove(newer)
                state, torn = backup_file.read(latest)
        has_latest = file_utils.exists(latest)
        is_there = has_latest and not torn
        if is_there and state is None and file_utils.exists(self._training_metadata_path):
            with file_utils.File(self._training_metadata_path, "r") as file:
                state = json.loads(file.read())
        over = is_there and state is not None and state.get("fit", 0) > self._number
        found = {"path": latest if is_there else None, "state": state, "is_over": over, "lines": lines, "has_latest": has_latest}
        mark, run = self._mark, this_run()
        if file_utils.exists(mark):
            mark_state, why = backup_file.read(mark)
            if mark_state is not None and (over or run.restarts(mark_state["run"])):
                lines.append(f"this `fit` has ended before the restart, and is passed by: its weights are those of {mark}")
                return {**found, "path": mark, "state": mark_state, "is_over": True}
            if mark_state is None or mark_state["run"]["process"] != run.process:
                for path in glob.glob("finished-*.weights.h5", root_dir=self._directory):
                    os.remove(os.path.join(self._directory, path))
                lines.append(
                    f"{mark} cannot be read: {why}; it is removed, and this `fit` trains"
                    if why
                    else f"{self._directory} had the end of an earlier run, not of this job: this run trains from its beginning"
                )
        if over:
            lines.append(
                "this `fit` has ended before the failure, and is passed by: the weights are those of the backup of a later one"
            )
        elif is_there and state is not None:
            step = f", step {state['batch']}" if state["batch"] and "position" in state else ""
            lines.append(f"training goes on from the backup in {self._directory}: epoch {state['epoch'] + 1}{step}")
        return found

    def _check_is_shared(self, found: State) -> None:
        """Raises RuntimeError on a worker that does not see what the chief sees."""
        path = found["path"]
        same = file_utils.exists(self._weights_path) == found["has_latest"]
        if same and path is not None and not self._is_chief:
            state, why = backup_file.read(path)
            # As text: in logs may be NaN, which does not equal itself.
            same = file_utils.exists(path) and not why and (state is None or json.dumps(state) == json.dumps(found["state"]))
        if not same:
            raise errors.runtime_error(
                "`backup_dir` must be on a file system that all workers share: the chief found another backup there.",
                backup_dir=self._directory,
                fix="Give all workers the same directory of a shared file system.",
            )

    def _go_on(self, path: str, state: State | None, is_over: bool) -> None:
        """Restores the file at `path`, of that state of `fit`, which may be over."""
        self._path = path
        self._load_weights(state)
        if state is None:  # of Keras without tfdist
            return
        self.model._initial_epoch = state["epoch"]
        self._restored, self._current_epoch = state, state["epoch"]
        restore_extra_state(self.model, backup_file.read_arrays(path, "extra"))
        if is_over or state.get("stop_training") and not state["batch"]:
            self.model._initial_epoch = self.params["epochs"]
        if not is_over and "position" in state:
            self._go_to(state)

    def _go_to(self, state: State) -> None:
        """Lets training begin at the place in the data that `state` has."""
        if state["batch"]:
            raise errors.runtime_error(
                "The backup is of the middle of an epoch: `tfdist.extensions.resuming`, which goes on from it, is not installed.",
                path=self._path,
                fix="Install the whole of tfdist, or remove `backup_dir` to train from the beginning.",
            )

    def _load_weights(self, state: State | None) -> None:
        """Loads the weights, and the state of optimizers, which are built for it; Keras would build `model.optimizer` alone."""
        if not self.model.built:
            raise errors.value_error(
                "`BackupAndRestore` needs a model that is built before `fit`.",
                model=self.model.name,
                fix="Call the model on a batch, in `strategy.scope()`, before `fit`.",
            )
        optimizer = self.model.optimizer
        with self._strategy.scope():
            if state is not None and "optimizers" in state:
                build_optimizers(self.model, state["optimizers"])
            elif optimizer is not None and not optimizer.built:
                optimizer.build(self.model.trainable_variables)
        try:
            self.model.load_weights(self._path)
        except Exception as error:  # the file is whole, as `_find` has seen
            raise errors.value_error(
                f"The backup cannot be loaded into this model: {str(error).partition(chr(10))[0]}",
                path=self._path,
                fix="Give each model a `backup_dir` of its own, or remove the backup to begin anew.",
            ) from error

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores what the other callbacks know; they have begun."""
        if self._restored is not None and "callbacks" in self._restored:
            arrays = backup_file.read_arrays(self._path, "callbacks")
            restore_callback_states(self._callbacks, self._restored["callbacks"], arrays)

    # Running

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._current_epoch = epoch  # in the first epoch after a restart Keras's is 0
        self._restored = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._finds_steps:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Where no place in the middle of an epoch is found again, backups are of the ends of epochs, whatever `save_freq` is."""
        super().on_epoch_end(epoch, logs)
        if not self._finds_steps and self.save_freq != "epoch":
            self._save_model()

    def _save_model(self) -> None:
        """Writes a backup of where training is."""
        if len(self.model.variables) != self._variables:  # a backup is restored before the first step
            raise errors.value_error(
                "`BackupAndRestore` needs a model that is built before `fit`: its first step has made variables, and no run "
                "could go on from a backup of them.",
                model=self.model.name,
                fix="Call the model on a batch, in `strategy.scope()`, before `fit`.",
            )
        if self.double_checkpoint:
            write_on_chief(self._strategy, "BackupAndRestore/previous", self._keep_previous)
        if self._is_chief and file_utils.is_remote_path(self._directory) and not file_utils.exists(self._directory):
            file_utils.makedirs(self._directory)
        state = self._write(self._weights_path, {})
        metadata = json.dumps({"epoch": state["epoch"], "batch": state["batch"]}).encode()
        path = self._training_metadata_path
        write_on_chief(self._strategy, "BackupAndRestore/metadata", lambda: _write_bytes(path, metadata))

    def _keep_previous(self) -> None:
        for latest, previous in self._files:
            if file_utils.exists(latest):
                (file_utils.copy if file_utils.is_remote_path(latest) else copy_file)(latest, previous)

    def _write(self, path: str, more: State, **arrays: backup_file.State) -> State:
        numbers, of_callbacks = callback_states(self._callbacks)
        state = {
            "epoch": self._current_epoch,
            "batch": 0,
            "fit": self._number,
            "callbacks": numbers,
            "optimizers": trained_variables(self.model),
            "stop_training": bool(self.model.stop_training),
            "run": dataclasses.asdict(this_run()),
            **more,
        }
        backup_file.write(path, self.model, state, {"extra": extra_state(self.model), "callbacks": of_callbacks, **arrays})
        return state

    # Ending

    def on_train_end(self, logs: Any = None) -> None:
        """Removes the backup, and leaves a mark where a restart of this job can come; other callbacks have ended."""
        self.model._initial_epoch = None
        self._ended[self._key] += 1
        history, restored = getattr(self.model, "history", None), self._restored or {}
        leaves_mark = "history" in restored
        if leaves_mark:
            if history is not None:
                history.history, history.epoch = restored["history"], restored["epochs"]
            set_random_states(restored["random"])
        elif restored.get("fit", 0) <= self._number:
            leaves_mark = self._share("job", this_run().job != "" and not file_utils.is_remote_path(self._directory))
            if leaves_mark:
                curve, epochs = getattr(history, "history", {}), getattr(history, "epoch", [])
                self._write(self._mark, {"history": curve, "epochs": epochs, "random": random_states()})
            if self.delete_checkpoint:
                self._on_chief("remove", lambda: self._remove(leaves_mark))
        if leaves_mark and self._is_chief:
            remove_after_success(self._mark)  # by the launcher: no restart can come any more
        self.leave(self)

    def _remove(self, leaves_mark: bool) -> None:
        for path in itertools.chain(*self._files) if leaves_mark else [self._directory]:
            if file_utils.exists(path):
                (file_utils.remove if leaves_mark else file_utils.rmtree)(path)


BACKUP: Place[type[FitBackup]] = Place(FitBackup)


def _write_bytes(path: str, content: bytes) -> None:
    if not file_utils.is_remote_path(path):
        write_bytes(path, content)
        return
    with file_utils.File(path, "wb") as file:
        file.write(content)


def _keep_rows_before(callbacks: Iterable[Any], epoch: int) -> None:
    """Has each `CSVLogger` in `callbacks` write after the rows of the epochs that are over.

    Rows that this run had written of `epoch` and later ones are dropped; rows of runs before, which it has appended to, stay.
    """
    for logger in callbacks:
        if isinstance(logger, keras.callbacks.CSVLogger):
            logger.append = True
            if file_utils.exists(logger.filename):
                _drop_rows_from(epoch, logger)


def _drop_rows_from(epoch: int, logger: Any) -> None:
    with file_utils.File(logger.filename, "r") as file:
        lines = file.readlines()
    firsts = [line.partition(logger.sep)[0] for line in lines]
    epochs = [int(first) if first.isdigit() else -1 for first in firsts]
    kept = len(lines)
    # After a row of this run that was dropped is none, or that of the next epoch.
    while kept and epochs[kept - 1] >= epoch and epochs[kept : kept + 1] in ([], [epochs[kept - 1] + 1]):
        kept -= 1
    if kept < len(lines):
        with file_utils.File(logger.filename, "w") as file:
            file.write("".join(lines[:kept]))
