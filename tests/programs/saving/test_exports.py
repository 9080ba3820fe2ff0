"""What is exported is what one device would have exported: TensorFlow without tfdist serves it, with the same outputs."""

import copy
import json
import os
import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import strategy_for

from tests.devices import of_cpus

pytestmark = pytest.mark.timeout(300)

X = np.random.default_rng(0).normal(size=(8, 5)).astype("float32")
Y = np.arange(8) % 3


def dense(strategy):
    with strategy.scope():
        layers = [
            keras.layers.Dense(7, activation="relu"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(3),
        ]
        model = keras.Sequential([keras.Input((5,)), *layers])
    return trained(model, strategy)


def trained(model, strategy):
    with strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(use_ema=True), loss, metrics=["accuracy"])
    model.fit(X, Y, batch_size=8, verbose=0)
    return model


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(7, activation="relu")
        self.dropout = keras.layers.Dropout(0.5)
        self.head = keras.layers.Dense(3)
        self.calls = keras.metrics.Sum(name="calls")

    def call(self, x, training=False):
        return self.head(self.dropout(self.hidden(x), training=training))


def subclassed(strategy):
    with strategy.scope():
        model = Subclassed()
    return trained(model, strategy)


SERVES = """
import json, sys
import numpy as np, tensorflow as tf

x, expected = np.load(sys.argv[1] + "/x.npy"), json.load(open(sys.argv[1] + "/expected.json"))
for path, outputs in expected.items():
    if path.endswith(".tflite"):
        interpreter = tf.lite.Interpreter(path)
        index = interpreter.get_input_details()[0]["index"]
        interpreter.resize_tensor_input(index, x.shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(index, x)
        interpreter.invoke()
        served = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    else:
        loaded = tf.saved_model.load(path)
        served = next(iter(loaded.signatures["serving_default"](tf.constant(x)).values()))
    np.testing.assert_allclose(served, outputs, rtol=1e-5, atol=1e-6, err_msg=path)
assert "tfdist" not in sys.modules and len(tf.config.list_logical_devices("CPU")) == 1
print("served", len(expected))
"""

MODELS = {
    "dense-0": lambda: dense(strategy_for(2, 0)),
    "dense-1": lambda: dense(strategy_for(2, 1)),
    "dense-2": lambda: dense(strategy_for(3, 2)),
    "dense-3": lambda: dense(strategy_for(3, 3)),
    "subclassed-3": lambda: subclassed(strategy_for(2, 3)),
}


def exported(model, folder, but):
    """Exports `model` in every way but some, and returns where to."""
    ways = {
        "export": lambda path: model.export(path, verbose=False),
        "export_in_scope": lambda path: in_scope(model, lambda: model.export(path, verbose=False)),
        "saved_model": lambda path: tf.saved_model.save(model, path),
        "archive": lambda path: archived(model, path),
        "litert.tflite": lambda path: model.export(path, format="litert", verbose=False),
        "converter.tflite": lambda path: converted(model, path),
    }
    paths = []
    for name, write in ways.items():
        if name not in but:
            paths.append(str(folder / name))
            write(paths[-1])
    return paths


def in_scope(model, function):
    with model.distribute_strategy.scope():
        function()


def archived(model, path):
    archive = keras.export.ExportArchive()
    archive.add_endpoint("go", lambda x: model(x, training=False), input_signature=[tf.TensorSpec((None, 5))])
    archive.write_out(path, verbose=False)


def converted(model, path):
    with open(path, "wb") as file:
        file.write(tf.lite.TFLiteConverter.from_keras_model(model).convert())


@of_cpus("it starts a process")
@pytest.mark.parametrize(("names", "but"), [(("dense-3",), ("export", "converter.tflite")), exhaustive(tuple(MODELS), ())])
def test_tensorflow_without_tfdist_serves_it(names, but, tmp_path):
    assert_tensorflow_serves({name: MODELS[name] for name in names}, but, tmp_path)


def assert_tensorflow_serves(models, but, tmp_path):
    """TensorFlow without tfdist serves what is exported of the models, in every way but some."""
    expected = {}
    for name, build in models.items():
        model = build()
        variables, history = [variable.numpy() for variable in model.variables], model.predict(X, verbose=0)
        (tmp_path / name).mkdir()
        expected |= dict.fromkeys(exported(model, tmp_path / name, but), history.tolist())
        # The model is what it was, and trains on.
        for variable, before in zip(model.variables, variables, strict=True):
            np.testing.assert_array_equal(variable.numpy(), before)
        assert isinstance(model.trainable_variables[0].value, tf.distribute.DistributedValues)
        model.fit(X, Y, batch_size=8, verbose=0)
        assert not np.array_equal(model.trainable_variables[0].numpy(), variables[0])
    assert_served(expected, tmp_path)


def assert_served(expected, folder):
    """TensorFlow alone serves what was exported: at each path, of `X`, the outputs that are `expected`."""
    np.save(folder / "x.npy", X)
    (folder / "expected.json").write_text(json.dumps(expected))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-c", SERVES, str(folder)], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert ended.stdout.endswith(f"served {len(expected)}\n"), ended.stderr[-3000:]


def test_an_export_in_a_step_is_refused():
    strategy = strategy_for(2, 3)
    model = dense(strategy)
    with pytest.raises(RuntimeError, match="Export it after the step"):
        strategy.run(lambda: model.export("nowhere"))


COPIES = ("clone", "weights", "file", "pickle", "deepcopy")


@pytest.mark.parametrize(
    ("zero_stage", "ways", "is_everywhere"), [(3, ("file",), False), *(exhaustive(stage, COPIES, True) for stage in range(4))]
)
def test_copies_are_the_model(zero_stage, ways, is_everywhere, tmp_path):
    """In the scope and outside of it; of another stage; and they train on as one device does."""
    strategy, other = strategy_for(2, zero_stage), strategy_for(3, 3 - zero_stage)
    model = dense(strategy)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    outputs, weights, pickled = model.predict(X, verbose=0), model.get_weights(), pickle.dumps(model)

    def cloned():
        copied = keras.models.clone_model(model)
        copied.set_weights(weights)
        return copied

    def loaded():
        copied = keras.models.clone_model(model)
        copied.load_weights(tmp_path / "model.weights.h5")
        return copied

    copies = {
        "clone": cloned,
        "weights": loaded,
        "file": lambda: keras.models.load_model(tmp_path / "model.keras"),
        "pickle": lambda: pickle.loads(pickled),
        "deepcopy": lambda: copy.deepcopy(model),
    }
    losses = {}
    for name in ways:
        # A deep copy reads, as in its own scope only.
        places = (None, strategy) if name == "deepcopy" else (None, strategy, other) if is_everywhere else (None, other)
        for place in places:
            with (place or tf.distribute.get_strategy()).scope():
                copied = copies[name]()
            np.testing.assert_allclose(copied.predict(X, verbose=0), outputs, rtol=1e-5, atol=1e-6, err_msg=name)
            is_of_strategy = isinstance(copied.trainable_variables[0].value, tf.distribute.DistributedValues)
            assert is_of_strategy == (place is not None), name
            if name in ("file", "pickle", "deepcopy"):
                assert copied.compiled
                for mine, theirs in zip(copied.optimizer.variables, model.optimizer.variables, strict=True):
                    np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
                losses.setdefault(name, []).append(copied.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history["loss"][0])
    np.testing.assert_allclose(np.concatenate(list(losses.values())), losses["file"][0], rtol=1e-5)
