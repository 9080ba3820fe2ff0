"""What the workers of the parity tests run."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

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


def train_all() -> dict[str, dict[str, Any]]:
    first, third = (tfdist.MultiWorkerShardedStrategy(zero_stage=stage) for stage in (1, 3))
    return {
        "stage 1": train_one(first, infers=False),
        "stage 3": train_one(third),
        "stage 3, eagerly": train_one(third, run_eagerly=True),
    }
