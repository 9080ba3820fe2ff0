"""What the workers of the parity tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests import training
from tests.parity.comparison import BatchLogs, state


def train_one(strategy: Any, infers: bool = True, **settings: Any) -> dict[str, Any]:
    """Trains with two steps per execution and metrics that are no means, on data that do not divide; evaluates, predicts."""
    x, y = training.vectors(56)
    labels = (y % 2).astype("float32")[:, None]
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((training.FEATURES,)), training.ScaleAndShift(), keras.layers.Dense(1, activation="sigmoid")]
        )
        metrics = [keras.metrics.AUC(name="auc", num_thresholds=20), keras.metrics.TruePositives(name="tp")]
        model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=metrics, steps_per_execution=2, **settings)
    logs = BatchLogs()
    history = model.fit(x, labels, batch_size=11, verbose=0, shuffle=False, callbacks=[logs])
    found = {"history": history.history, "after each execution": logs.train, **state(model)}
    if not infers:
        return found
    return {
        **found,
        "evaluate": model.evaluate(x, labels, batch_size=11, verbose=0),
        "predict": model.predict(x, batch_size=11, verbose=0),
        "train_on_batch": [float(np.mean(value)) for value in model.train_on_batch(x[:8], labels[:8])],
        "trained on a batch": state(model),
    }


class CustomStep(keras.Model):
    """A step of one's own: a Keras loss, a mean and a penalty; a number, a tracker and a metric in its logs."""

    def __init__(self, auc: keras.metrics.Metric) -> None:
        super().__init__()
        self.head = keras.layers.Dense(1, activation="sigmoid")
        self.head.build((None, training.FEATURES))
        self.tracker = keras.metrics.Mean(name="tracked")
        self.auc = auc

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self.head(x)
            loss = keras.losses.BinaryCrossentropy()(y, y_pred) + tf.reduce_mean(y_pred**2)
            loss += 0.01 * tf.reduce_sum(self.head.kernel**2)
        variables = self.trainable_variables
        gradients, norm = tfdist.clip_by_global_norm(tape.gradient(loss, variables), variables, 0.2)
        self.optimizer.apply(gradients, variables)
        self.tracker.update_state(loss)
        self.auc.update_state(y, y_pred)
        return {"loss": loss, "norm": norm, "tracked": self.tracker.result(), "auc": self.auc.result()}


def train_own_step(strategy: Any, **settings: Any) -> dict[str, Any]:
    """Trains on batches of 11 of 34 examples: of the last the second worker has none. A metric is made outside `scope()`."""
    x, y = training.vectors(34)
    keras.utils.set_random_seed(3)
    auc = keras.metrics.AUC(name="auc", num_thresholds=20)
    with strategy.scope():
        model = CustomStep(auc)
        model.compile(keras.optimizers.Adam(0.01), **settings)
    logs = BatchLogs()
    labels = (y % 2).astype("float32")[:, None]
    history = model.fit(x, labels, batch_size=11, epochs=2, verbose=0, shuffle=False, callbacks=[logs])
    return {"history": history.history, "after each batch": logs.train, **state(model)}


CASES: dict[str, Callable[[Any, Any], dict[str, Any]]] = {  # of strategies of stages 1 and 3
    "stage 1": lambda first, third: train_one(first, infers=False),
    "stage 3": lambda first, third: train_one(third),
    "stage 3, eagerly": lambda first, third: train_one(third, run_eagerly=True),
    "own step, stage 1": lambda first, third: train_own_step(first),
    "own step, stage 3": lambda first, third: train_own_step(third),
    "own step, stage 3, eagerly": lambda first, third: train_own_step(third, run_eagerly=True),
}


def train_all(names: list[str]) -> dict[str, dict[str, Any]]:
    strategies = [tfdist.MultiWorkerShardedStrategy(zero_stage=stage) for stage in (1, 3)]
    return {name: CASES[name](*strategies) for name in names}
