"""`BackupAndRestore` under a tfdist strategy: a `fit` that goes on at the very step, in one process and over several workers.

The chief writes a backup, and all train on from the same one. What a backup is of and what is restored when:

    before other callbacks begin        weights and the optimizer's state, `backup_file.arrays` of seeds and the like; `fit` is
                                        told the epoch, and its data the place
    after they have begun               what Keras's callbacks know in Python: beginning has emptied it
    after they have begun an epoch      in the middle of one: metrics, which `fit` has emptied, and learning rates, which a
                                        scheduler has set a second time
    after they have ended a step,       a backup is written: so it has what they have done
    or an epoch

Note: several `fit` into one directory. Each has a number, counted by the process; a backup knows that of its own. When a program
is started again, a `fit` with a smaller number than that of the backup is over, and is passed by.

Note: a `fit` that is over. Keras removes the backup at its end; a program that is killed later would train again. Where it is
known which job this is (`runtime.this_run`) a mark is left, `finished-<number>.weights.h5`, a backup of the end. A restart of the
job passes by what has a mark, with its weights and its history; another run of the program removes the marks, and trains.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import itertools
import json
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from keras.src.utils import file_utils, io_utils

from tfdist import errors
from tfdist.checkpoint import backup_file
from tfdist.checkpoint.callback_states import callback_states, restore_callback_states
from tfdist.checkpoint.extra_state import (
    build_optimizers,
    extra_state,
    metrics_state,
    restore_extra_state,
    restore_metrics_state,
    trained_variables,
)
from tfdist.checkpoint.saving import write_on_chief
from tfdist.checkpoint.staging import copy_file, write_bytes
from tfdist.checkpoint.unsaved import note_optimizers
from tfdist.checkpoint.writing_role import all_workers_inside, is_chief
from tfdist.runtime import random_states, remove_after_success, set_random_states, this_run

State = dict[str, Any]


class FitBackup:
    """The backups of one `fit`: what is found when it begins, written while it runs, and left at its end.

    All methods are called by all workers at once.

    Args:
        callback: Keras's `BackupAndRestore`.
        strategy: the tfdist strategy of its model.
        data: the data that `fit` reads, a `data.FitData`.
        callbacks: all callbacks of this `fit`.
        build: `build(model)` builds what the first step would, as far as it can.
    """

    # How many `fit` this process has ended, by directory.
    _ended: collections.Counter[str] = collections.Counter()

    def __init__(self, callback: Any, strategy: Any, data: Any, callbacks: Sequence[Any], build: Callable[[Any], None]):
        self._callback, self._strategy, self._data, self._callbacks = callback, strategy, data, callbacks
        self._model, self._build = callback.model, build
        self._directory = str(callback.backup_dir)
        self._number = self._ended[self._key]
        self._is_chief = is_chief(strategy)
        self._epoch, self._batches = 0, 0
        self._logs: dict[str, Any] = {}
        self._restored: State | None = None
        self._path = ""
        self._variables = 0  # of the model, when `fit` begins
        self._rates: list[tuple[Any, Any]] = []
        self.finds_steps = True  # whether a backup may be of the middle of an epoch

    @property
    def _key(self) -> str:
        return self._directory if file_utils.is_remote_path(self._directory) else os.path.abspath(self._directory)

    def _share(self, name: str, value: Any) -> Any:
        return json.loads(self._strategy.share(f"BackupAndRestore/{name}", json.dumps(value) if self._is_chief else ""))

    def _on_chief(self, name: str, action: Callable[[], Any]) -> Any:
        """Has the chief do what changes files, while no worker reads them; returns what it returns on every worker."""
        with all_workers_inside(self._strategy, f"BackupAndRestore/{name}"):
            return self._share(name, action() if self._is_chief else None)

    def _say(self, line: str) -> None:
        if self._is_chief:
            io_utils.print_msg(f"tfdist: {line}")

    @property
    def goes_on(self) -> bool:
        """Whether something was restored: an epoch that runs, the beginning of one, or the end."""
        return self._path != ""

    # Beginning

    def restore(self) -> None:
        """Restores what is found, before the other callbacks begin."""
        self._model._initial_epoch = None  # Keras keeps it for the next `fit`
        self._data.begin()
        note_optimizers(self._model)
        self._check_data()
        if not all(layer.built for layer in self._model._flatten_layers(include_self=True)):
            self._build(self._model)
        self._variables = len(self._model.variables)
        found = self._on_chief("found", self._find)
        for line in found["lines"]:
            self._say(line)
        self._check_is_shared(found)
        if found["path"] is None:
            return
        self._path, state = found["path"], found["state"]
        self._load_weights(state)
        if state is None:  # of Keras without tfdist, which has set the epoch
            return
        self._model._initial_epoch = state["epoch"]
        self._restored = state
        restore_extra_state(self._model, backup_file.read_arrays(self._path, "extra"))
        if found["is_over"] or state.get("stop_training") and not state["batch"]:
            self._model._initial_epoch = self._callback.params["epochs"]
        if found["is_over"] or "position" not in state:
            return
        self._epoch, self._batches = state["epoch"], state["batch"]
        self._rates = [(v, v.numpy()) for v in getattr(self._model.optimizer, "variables", ()) if v.name == "learning_rate"]
        self._data.go_to(
            state["position"], state["validations"], state["logs"], self._say, state["stop_training"], self._is_chief
        )

    def _check_is_built(self) -> None:
        """Raises ValueError where the first step has made variables of the model: a backup is restored before that step."""
        if len(self._model.variables) != self._variables:
            raise errors.value_error(
                "`BackupAndRestore` needs a model that is built before `fit`: its first step has made variables, and no run "
                "could go on from a backup of them.",
                model=self._model.name,
                fix="Call the model on a batch, in `strategy.scope()`, before `fit`.",
            )

    def _check_data(self) -> None:
        """Says so where no place in the middle of an epoch can be found again."""
        if self._callback.save_freq == "epoch":
            return
        if file_utils.is_remote_path(self._directory):
            why = f"{self._directory} is a remote folder, in which only weights and epoch are kept."
        elif why := self._share("data", self._data.unfindable()):
            why = (
                f"a place in the middle of one cannot be found again in these data: {why}. `keras.utils.set_random_seed(...)` "
                "before the data are made seeds what has no seed."
            )
        self.finds_steps = not why
        if why and self._is_chief:
            warnings.warn(
                f"`BackupAndRestore(save_freq={self._callback.save_freq})` saves at the end of each epoch only: {why}",
                stacklevel=2,
            )

    def _find(self) -> State:
        """Returns what this `fit` begins with: the path of a file, if there is any, its state, and lines for the user."""
        callback, lines = self._callback, []
        state, torn = backup_file.read(callback._weights_path)
        if torn:
            lines.append(f"the backup {callback._weights_path} cannot be read: {torn}")
            if not file_utils.exists(callback._prev_weights_path):
                lines[-1] += "; there is none before it, and training begins anew"
            elif why := backup_file.read(callback._prev_weights_path)[1]:
                lines[-1] += f"; nor can the one before it: {why}; training begins anew"
            else:
                lines[-1] += "; the one before it is taken"
                self._bring_back_previous()
                state, torn = backup_file.read(callback._weights_path)
        has_latest = file_utils.exists(callback._weights_path)
        is_there = has_latest and not torn
        if is_there and state is None and file_utils.exists(callback._training_metadata_path):
            with file_utils.File(callback._training_metadata_path, "r") as file:
                state = json.loads(file.read())
        over = is_there and state is not None and state.get("fit", 0) > self._number
        mark, run = self._mark, this_run()
        if file_utils.exists(mark):
            mark_state, why = backup_file.read(mark)
            if mark_state is not None and (over or run.restarts(mark_state["run"])):
                lines.append(f"this `fit` has ended before the restart, and is passed by: its weights are those of {mark}")
                return {"path": mark, "state": mark_state, "is_over": True, "lines": lines, "has_latest": has_latest}
            if mark_state is None or mark_state["run"]["process"] != run.process:
                self._remove_marks()
                lines.append(
                    f"{mark} cannot be read: {why}; it is removed, and this `fit` trains"
                    if why
                    else f"{self._directory} had the end of an earlier run, not of this job: this run trains from its beginning"
                )
        if not is_there:
            return {"path": None, "state": None, "is_over": False, "lines": lines, "has_latest": has_latest}
        if over:
            lines.append(
                "this `fit` has ended before the failure, and is passed by: the weights are those of the backup of a later one"
            )
        elif state is not None:
            step = f", step {state['batch']}" if state["batch"] and "position" in state else ""
            lines.append(f"training goes on from the backup in {self._directory}: epoch {state['epoch'] + 1}{step}")
        return {"path": callback._weights_path, "state": state, "is_over": over, "lines": lines, "has_latest": has_latest}

    @property
    def _mark(self) -> str:
        return file_utils.join(self._directory, f"finished-{self._number}.weights.h5")

    @property
    def _files(self) -> tuple[tuple[str, str], ...]:
        """The latest and the previous file of the weights, and those of Keras's metadata."""
        callback = self._callback
        metadata = callback._training_metadata_path, callback._prev_training_metadata_path
        return (callback._weights_path, callback._prev_weights_path), metadata

    def _remove_marks(self) -> None:
        for path in glob.glob("finished-*.weights.h5", root_dir=self._directory):
            os.remove(os.path.join(self._directory, path))

    def _bring_back_previous(self) -> None:
        for latest, previous in self._files:
            if file_utils.exists(previous):
                file_utils.copy(previous, latest)
            elif file_utils.exists(latest):
                file_utils.remove(latest)

    def _check_is_shared(self, found: State) -> None:
        """Raises RuntimeError on a worker that does not see what the chief sees."""
        path = found["path"]
        same = file_utils.exists(self._callback._weights_path) == found["has_latest"]
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

    def _load_weights(self, state: State | None) -> None:
        """Loads the weights, and the state of optimizers, which are built for it; Keras would build `model.optimizer` alone."""
        if not self._model.built:
            raise errors.value_error(
                "`BackupAndRestore` needs a model that is built before `fit`.",
                model=self._model.name,
                fix="Call the model on a batch, in `strategy.scope()`, before `fit`.",
            )
        optimizer = self._model.optimizer
        with self._strategy.scope():
            if state is not None and "optimizers" in state:
                build_optimizers(self._model, state["optimizers"])
            elif optimizer is not None and not optimizer.built:
                optimizer.build(self._model.trainable_variables)
        try:
            self._model.load_weights(self._path)
        except Exception as error:  # the file is whole, as `_find` has seen
            raise errors.value_error(
                f"The backup cannot be loaded into this model: {str(error).partition(chr(10))[0]}",
                path=self._path,
                fix="Give each model a `backup_dir` of its own, or remove the backup to begin anew.",
            ) from error

    def restore_callbacks(self) -> None:
        """Restores what the other callbacks know; they have begun."""
        if self._restored is not None and "callbacks" in self._restored:
            arrays = backup_file.read_arrays(self._path, "callbacks")
            restore_callback_states(self._callbacks, self._restored["callbacks"], arrays)

    # Running

    def begin_epoch(self, epoch: int) -> None:
        """Restores, where an epoch goes on in its middle, what its beginning has changed; other callbacks have begun it."""
        self._callback._current_epoch = self._epoch = epoch
        restored, self._restored = self._restored, None
        if restored is None or not restored["batch"] or "position" not in restored:
            self._batches = 0
            return
        self._callback._last_batch_seen = restored["batch"] - 1
        self._model.stop_training = restored["stop_training"]
        for variable, value in self._rates:
            variable.assign(value)
        restore_extra_state(self._model, backup_file.read_arrays(self._path, "extra"))
        if any(not getattr(metric, "built", True) for metric in self._model.metrics):
            self._build(self._model)
        restore_metrics_state(self._model, backup_file.read_arrays(self._path, "metrics"))

    def end_batches(self, batch: int, logs: Any) -> None:
        """Notes a step that has ended: the last one of an execution."""
        self._batches, self._logs = batch + 1, dict(logs or {})

    def end_epoch(self, epoch: int) -> None:
        self._epoch, self._batches, self._logs = epoch + 1, 0, {}

    def write(self) -> None:
        """Writes a backup of where training is."""
        self._check_is_built()
        if self._callback.double_checkpoint:
            write_on_chief(self._strategy, "BackupAndRestore/previous", self._keep_previous)
        if self._is_chief and file_utils.is_remote_path(self._directory) and not file_utils.exists(self._directory):
            file_utils.makedirs(self._directory)
        state = self._write(self._callback._weights_path)
        metadata = json.dumps({"epoch": state["epoch"], "batch": state["batch"]}).encode()
        path = self._callback._training_metadata_path
        write_on_chief(self._strategy, "BackupAndRestore/metadata", lambda: _write_bytes(path, metadata))

    def _keep_previous(self) -> None:
        for latest, previous in self._files:
            if file_utils.exists(latest):
                (file_utils.copy if file_utils.is_remote_path(latest) else copy_file)(latest, previous)

    def _write(self, path: str, **more: Any) -> State:
        numbers, arrays = callback_states(self._callbacks)
        state = {
            "epoch": self._epoch,
            "batch": self._batches,
            "fit": self._number,
            "position": self._data.position(self._batches),
            "validations": self._data.validations(),
            "logs": self._logs,
            "callbacks": numbers,
            "optimizers": trained_variables(self._model),
            "stop_training": bool(self._model.stop_training),
            "run": dataclasses.asdict(this_run()),
            **more,
        }
        groups = {"extra": extra_state(self._model), "callbacks": arrays}
        if self._batches:
            groups["metrics"] = metrics_state(self._model)
        backup_file.write(path, self._model, state, groups)
        return state

    # Ending

    def end(self) -> None:
        """Removes the backup, and leaves a mark where a restart of this job can come; other callbacks have ended."""
        self._model._initial_epoch = None
        self._ended[self._key] += 1
        history = getattr(self._model, "history", None)
        if self._restored is not None and "history" in self._restored:
            if history is not None:
                history.history, history.epoch = self._restored["history"], self._restored["epochs"]
            set_random_states(self._restored["random"])
            self._tell_of_mark()
            return
        if self._restored is not None and self._restored.get("fit", 0) > self._number:
            return
        leaves_mark = self._share("job", this_run().job != "" and not file_utils.is_remote_path(self._directory))
        if leaves_mark:
            curve, epochs = getattr(history, "history", {}), getattr(history, "epoch", [])
            self._write(self._mark, history=curve, epochs=epochs, random=random_states())
            self._tell_of_mark()
        if self._callback.delete_checkpoint:
            self._on_chief("remove", lambda: self._remove(leaves_mark))

    def _tell_of_mark(self) -> None:
        """Lets the launcher remove the mark when the job has succeeded, and no restart can come any more."""
        if self._is_chief:
            remove_after_success(self._mark)

    def _remove(self, leaves_mark: bool) -> None:
        if not leaves_mark:
            if file_utils.exists(self._directory):
                file_utils.rmtree(self._directory)
            return
        for path in itertools.chain(*self._files):
            if file_utils.exists(path):
                file_utils.remove(path)


def _write_bytes(path: str, content: bytes) -> None:
    if not file_utils.is_remote_path(path):
        write_bytes(path, content)
        return
    with file_utils.File(path, "wb") as file:
        file.write(content)
