"""Programs that go wrong on one worker, for the tests of failures."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import keras
import tensorflow as tf

import tfdist
from tests import training


class AtBatch(keras.callbacks.Callback):
    """Calls `act` at the end of batch `batch` of epoch `epoch`."""

    def __init__(self, epoch: int, batch: int, act: Any):
        super().__init__()
        self._at = (epoch, batch)
        self._act = act
        self._epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) == self._at:
            print("acting", flush=True)
            self._act()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    raise ValueError("the data of this worker are spoilt")


def leave() -> None:
    sys.exit(0)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


def hang() -> None:
    time.sleep(600)


ACTS = {"die": die, "raise": raise_error, "leave": leave, "terminate": terminate, "hang": hang}


def fit_and(act: str, step_timeout_seconds: float = 600.0) -> None:
    """Trains; in the middle of the second epoch the worker does `act` ("" goes on)."""
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=3, step_timeout_seconds=step_timeout_seconds)
    x, y = training.vectors()
    with strategy.scope():
        model = training.small()
        model.compile("sgd", training.loss_function())
    callbacks = [AtBatch(1, 2, ACTS[act])] if act else []
    model.fit(x, y, batch_size=12, epochs=1000, verbose=0, callbacks=callbacks)


def make_strategy(**settings: Any) -> int:
    return tfdist.MultiWorkerShardedStrategy(**settings).num_replicas_in_sync


def make_strategy_on(devices: int) -> int:
    tfdist.use_logical_cpus(devices)
    return make_strategy()


def settings_differ(worker_index: int) -> list[str]:
    """Makes strategies whose settings differ between the workers; returns the errors."""
    found = []
    for settings in ({"zero_stage": 2 + worker_index}, {"bucket_bytes": 1000 * (1 + worker_index)}):
        try:
            make_strategy(**settings)
        except ValueError as error:
            found.append(str(error))
    return found


def different_programs(case: str, worker_index: int) -> None:
    """Worker 1 differs from worker 0 in one thing."""
    odd = worker_index == 1
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=3)
    x, y = training.vectors()
    width = 11 if odd and case == "width" else 9
    layers = 2 if odd and case == "layers" else 1
    optimizer = keras.optimizers.SGD(0.1) if odd and case == "optimizer" else keras.optimizers.Adam(0.1)
    if odd and case == "setting of the optimizer":
        optimizer.epsilon = 1e-3
    with strategy.scope():
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
        model = keras.Sequential([keras.Input((training.FEATURES,)), *hidden, keras.layers.Dense(training.CLASSES)])
        model.compile(type(optimizer).from_config(optimizer.get_config()), training.loss_function())
    if case == "own collective":

        def on_rank():
            value = tf.ones([2])
            return tfdist.collectives.all_reduce(value) if odd else tfdist.collectives.all_gather(value)

        tf.function(lambda: strategy.run(on_rank))()
    if case == "data":
        y = y[:36] if odd else y
        x = x[: len(y)]
    model.fit(x, y, batch_size=12, epochs=2, verbose=0)
    if case == "only the chief evaluates" and not odd:
        model.evaluate(x, y, verbose=0)
    model.fit(x, y, batch_size=12, epochs=2, verbose=0)
    print("not caught", flush=True)
