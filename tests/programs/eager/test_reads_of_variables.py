"""Numbers that a callback reads from variables: the step, the learning rate, weights, slots, a metric's state."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.programs.comparing import SHARDED, assert_as_on_one_device

X = np.random.default_rng(5).normal(size=(12, 6)).astype("float32")
Y = np.random.default_rng(6).normal(size=(12, 1)).astype("float32")

OF_SCALARS = {
    "int": int,
    "int of the value": lambda v: int(v.value),
    "float": float,
    "float of the value": lambda v: float(v.value),
    "complex": lambda v: complex(v.value),
    "bool": lambda v: bool(v.value),
    "not": lambda v: not v.value,
    "formatted": lambda v: f"{float(v):.2f} {float(v.value):.2f} {v.numpy():.2f}",
    "item": lambda v: v.numpy().item(),
    "rounded": lambda v: round(float(v), 2),
    "condition": lambda v: bool(v.value > 1),
}
OF_ALL = {
    "array": np.array,
    "array of the value": lambda v: np.array(v.value),
    "asarray": np.asarray,
    "asarray of the value": lambda v: np.asarray(v.value),
    "copy": lambda v: np.array(v.value, copy=True),
    "another dtype": lambda v: np.array(v.value, dtype="float64"),
    "sum": lambda v: np.array(v.value + 1),
    "reflected": lambda v: np.array(1 - v.value),
    "sum of Keras's": lambda v: np.array(v + 1),
    "ufunc": lambda v: np.add(v.value, 1),
    "norm": lambda v: np.linalg.norm(v.value),
    "mean": lambda v: np.mean(v),
    "tensor": lambda v: tf.convert_to_tensor(v).numpy(),
    "tensor of the value": lambda v: tf.convert_to_tensor(v.value).numpy(),
    "operations": lambda v: np.array(keras.ops.sum(v)),
    "operations of the value": lambda v: np.array(keras.ops.sum(v.value)),
    "to NumPy": keras.ops.convert_to_numpy,
    "value to NumPy": lambda v: keras.ops.convert_to_numpy(v.value),
    "read": lambda v: v.value.read_value().numpy(),
    "numpy": lambda v: v.value.numpy(),
    "list": lambda v: np.array(v).tolist(),
    "slice": lambda v: np.array(v.value[..., None]),
    "traced": lambda v: tf.function(lambda: v.value + 1)().numpy(),
    "text": lambda v: bool(repr(v) and str(v) and repr(v.value) and f"{v}{v.value}"),
    "shape": lambda v: (tuple(v.shape), tuple(v.value.shape), int(tf.size(v.value))),
}


def _read(model, where):
    optimizer, (loss, metrics) = model.optimizer, model.metrics
    variables = {
        "step": optimizer.iterations,
        "learning rate": optimizer.learning_rate,
        "kernel": model.layers[0].kernel,
        "moving mean": model.layers[1].moving_mean,
        "slot": optimizer._momentums[0],
        "average": optimizer._model_variables_moving_average[0],
        "loss": loss.total,
        "metric": metrics.variables[0],
    }
    found = {}
    with where:
        for name, variable in variables.items():
            readers = OF_ALL | (OF_SCALARS if variable.shape == () else {})
            found[name] = {way: read(variable) for way, read in readers.items()}
    return found


def of_a_callback(strategy):
    """At the end of every epoch, outside `scope()` and in it."""
    with strategy.scope():
        layers = [
            keras.layers.Dense(5, use_bias=False),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse", metrics=["mae"])
    found = []

    def read(epoch, logs):
        found.append({"outside": _read(model, contextlib.nullcontext()), "inside": _read(model, strategy.scope())})

    callback = keras.callbacks.LambdaCallback(on_epoch_end=read)
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
    return found


class Scheduled(keras.Model):
    """Changes its learning rate by the step, as plain Python, in steps that run eagerly."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = []

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        step = int(self.optimizer.iterations)
        if step % 2:
            self.optimizer.learning_rate = float(self.optimizer.learning_rate) * 0.5
        self.seen.append([step, float(self.optimizer.learning_rate), int(np.array(self.optimizer.iterations.value))])
        return super().train_step(data)


def of_an_eager_step(strategy):
    """In a `train_step` that runs eagerly, by each device."""
    with strategy.scope():
        model = Scheduled()
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    model.fit(X, Y, batch_size=4, epochs=1, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "seen": model.seen[-1]}


@pytest.mark.as_traced
@pytest.mark.parametrize("zero_stage", SHARDED)
@pytest.mark.parametrize("program", [of_a_callback, of_an_eager_step], ids=lambda program: program.__name__)
def test_they_are_those_of_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)
