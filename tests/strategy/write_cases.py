"""What workers assign outside of steps, alike or not."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.runtime import failure_watch

X = np.ones((8, 4), "float32")


def made(stage: int) -> tuple[Any, Any]:
    failure_watch._GRACE_SECONDS = 2.0
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=stage)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, kernel_initializer="zeros", use_bias=False)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return strategy, model


def fit(model: Any, **arguments: Any) -> None:
    model.fit(X, X[:, :2], batch_size=4, verbose=0, **arguments)


class Rates(keras.callbacks.Callback):
    """Sets the learning rate in the midst of an epoch."""

    def __init__(self, rate: float | None):
        super().__init__()
        self.rate = rate

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and self.rate is not None:
            self.model.optimizer.learning_rate = self.rate


def assign(index: int, way: str, stage: int, folder: str) -> Any:
    """Assigns on worker `index` what the other does not, or not alike; it is to be refused."""
    strategy, model = made(stage)
    own = [np.full((4, 2), index + 1.0, "float32")]
    if way == "one":
        model.set_weights(own) if index == 0 else None
        fit(model)
    elif way == "each":
        model.set_weights(own)
        fit(model)
    elif way == "rate":
        fit(model, callbacks=[Rates(0.5 if index == 0 else None)], epochs=5)
    elif way == "file":
        path = pathlib.Path(folder) / f"{index}.weights.h5"
        plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, use_bias=False)])
        plain.set_weights(own)
        plain.save_weights(path)
        model.load_weights(path)
        model.evaluate(X, X[:, :2], verbose=0)
    elif way == "checkpoint":
        value = tf.Variable(own[0])
        saved = tf.train.Checkpoint(v=value).write(f"{folder}/{index}")
        with strategy.scope():
            known = tf.Variable(tf.zeros((4, 2)))
        tf.train.Checkpoint(v=known).read(saved)
        model.predict(X, verbose=0)
    elif way == "function":
        kernel = model.layers[0].kernel
        double = tf.function(lambda: kernel.value.assign(kernel.value * 2.0))
        double() if index == 1 else None
        fit(model)
    elif way == "loop":
        with strategy.scope():
            scale = tf.Variable(1.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        step = tf.function(lambda: strategy.run(lambda: tfdist.collectives.all_reduce(tf.ones([2]) * scale, "data")))
        step()
        scale.assign(index + 2.0)
        step()
        step()


def adapt(index: int, way: str, stage: int) -> None:
    """Makes of each worker's own words, or rows, what all must have alike."""
    failure_watch._GRACE_SECONDS = 2.0
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=stage)
    words = [["a", "b", "c"], ["b", "c", "a"]][index]
    texts, y = tf.constant([["a"], ["b"], ["c"], ["a"]]), np.ones((4, 1), "float32")
    with strategy.scope():
        lookup = keras.layers.StringLookup(vocabulary=words)
        rows = keras.layers.Normalization()
        dense = [keras.layers.Embedding(4, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
        if way == "model":
            model = keras.Sequential([keras.Input((1,), dtype="string"), lookup, *dense])
        elif way == "data":
            model = keras.Sequential([keras.Input((1,), dtype="int64"), *dense])
        else:
            rows.adapt(X[: index + 1] * (1.0 + index))
            model = keras.Sequential([keras.Input((4,)), rows, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((texts if way != "rows" else X[:4], y))
    data = data.map(lambda x, y: (lookup(x), y)) if way == "data" else data
    model.fit(data.batch(4), verbose=0)


def assign_alike(stage: int) -> list[Any]:
    """All that is assigned is the same on all workers, or is the chief's."""
    strategy, model = made(stage)
    rng = np.random.default_rng()  # no seed
    weights = strategy.from_chief([rng.normal(size=(4, 2)).astype("float32")])
    model.set_weights(weights)
    fit(model, callbacks=[Rates(0.5), keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)], epochs=3)
    model.set_weights(strategy.from_chief([rng.normal(size=(4, 2)).astype("float32") if weights else None]))
    model.evaluate(X, X[:, :2], verbose=0)
    words = strategy.from_chief({"words": sorted({str(x) for x in rng.integers(0, 99, 9)}), "none": None})
    return [*model.get_weights(), model.predict(X, verbose=0), float(model.optimizer.learning_rate), words]
