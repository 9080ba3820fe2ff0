"""A `fit` that fails, and is started again in this process, which is set back to what a new one begins with."""

import collections
import contextlib
import functools
import types
import warnings

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.devices import names
from tfdist.checkpoint import backups
from tfdist.checkpoint.extra_state import extra_state, restore_extra_state
from tfdist.runtime import job_run

ROWS, BATCH, EPOCHS = 20, 4, 3  # 5 steps an epoch
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, size=ROWS)


class Failed(Exception):
    pass


class Fail(keras.callbacks.Callback):
    """Fails when it comes to a step, or to a moment of an epoch."""

    def __init__(self, epoch, when):
        super().__init__()
        self.at, self.epoch = (epoch, when), None

    def _look(self, when):
        if (self.epoch, when) == self.at:
            raise Failed

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self._look("begin")

    def on_train_batch_end(self, batch, logs=None):
        self._look(batch)

    def on_test_batch_end(self, batch, logs=None):
        self._look("validation")

    def on_epoch_end(self, epoch, logs=None):
        self._look("end")

    def on_train_end(self, logs=None):
        self._look("over")


class Program:
    """A compiled model; `restart` sets it, and the process, back to the program's beginning."""

    def __init__(self, zero_stage, steps_per_execution=1, run_eagerly=False):
        keras.utils.set_random_seed(11)
        strategy = tfdist.ShardedStrategy(names(2), zero_stage=zero_stage)
        with strategy.scope():
            layers = [keras.layers.Dense(7, activation="tanh"), keras.layers.Dropout(0.4), keras.layers.Dense(3)]
            self.model = keras.Sequential([keras.Input((6,)), *layers])
            self.model.compile(
                keras.optimizers.Adam(0.01),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
                steps_per_execution=steps_per_execution,
                run_eagerly=run_eagerly,
            )
        self.model.optimizer.build(self.model.trainable_variables)
        self._begin = self.values(), extra_state(self.model)

    def values(self):
        return [variable.numpy() for variable in [*self.model.variables, *self.model.optimizer.variables]]

    def restart(self):
        keras.utils.set_random_seed(11)
        values, extra = self._begin
        for variable, value in zip([*self.model.variables, *self.model.optimizer.variables], values, strict=True):
            variable.assign(value)
        restore_extra_state(self.model, extra)
        self.model.reset_metrics()
        self.model._initial_epoch = None
        self.model.stop_training = False


@functools.cache
def program(zero_stage=0, **arguments):
    return Program(zero_stage, **arguments)


@contextlib.contextmanager
def processes(monkeypatch):
    """Gives a function that makes this a new process, of a job of that name; "": of none."""
    for name in ("TFDIST_JOB", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)

    def begin(job):
        monkeypatch.setenv("TFDIST_JOB", job)
        monkeypatch.setattr(backups.FitBackup, "_ended", collections.Counter())
        job_run._process.cache_clear()

    yield begin
    job_run._process.cache_clear()


# Data, as arguments of `fit`


def rows():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def arrays(**arguments):
    return lambda: {"x": X, "y": Y, "batch_size": BATCH, **arguments}


def dataset(make, **arguments):
    return lambda: {"x": make(rows()), **arguments}


def train(program, data, callbacks=(), fails=None):
    """Trains from the program's beginning; returns the history, None if it failed."""
    program.restart()
    own = [] if fails is None else [Fail(*fails)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            history = program.model.fit(**{"epochs": EPOCHS, "verbose": 0, **data()}, callbacks=[*callbacks, *own])
    except Failed:
        return None
    return history


def undisturbed(program, data, callbacks=()):
    history = train(program, data, callbacks)
    return types.SimpleNamespace(history=history.history, epoch=history.epoch, values=program.values())


def assert_goes_on(program, data, folder, fails, save_freq=2, callbacks=lambda: [], first=None):
    """Fails as often as is said, and ends with the curve, of the epochs that are left, and the weights of an undisturbed run."""
    expected = undisturbed(program, data, callbacks())
    for each in [*fails, None]:
        backup = keras.callbacks.BackupAndRestore(folder, save_freq=save_freq)
        history = train(program, data, [backup, *callbacks()], each)
        assert (history is None) == (each is not None), each
    assert history.epoch == expected.epoch[len(expected.epoch) - len(history.epoch) :]
    assert first is None or history.epoch[0] == first
    for name, values in history.history.items():
        assert values == expected.history[name][-len(values) :], name
    assert_same(program.values(), expected.values)
    assert not folder.exists()


def assert_same(values, expected):
    for mine, theirs in zip(values, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
