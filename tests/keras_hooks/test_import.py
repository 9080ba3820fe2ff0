"""What stands in Keras and TensorFlow before tfdist is imported, after that, and when it is used first; in fresh processes."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfdist
from tests import forks
from tfdist.keras_hooks import TABLE

pytestmark = pytest.mark.timeout(300)

ROOT = pathlib.Path(__file__).parents[2]

BEGIN = """
import importlib, json, sys
import keras, tensorflow as tf

def resolve(name):
    parts = name.split(".")
    for number in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:number]))
        except ModuleNotFoundError:
            continue
        for part in parts[number:]:
            found = getattr(found, part)
        return found

def attributes(names):
    return [getattr(resolve(owner), name) for owner, name in names]

def everything_in_keras():
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("keras"):
            for name, value in list(vars(module).items()):
                found[module_name, name] = value
                if isinstance(value, type) and value.__module__.startswith("keras"):
                    found |= {(module_name, name, own): attribute for own, attribute in list(vars(value).items())}
    return found

def changed(before):
    after = everything_in_keras()
    return sorted(".".join(key) for key, value in before.items() if after.get(key) is not value)

names = json.loads(sys.argv[1])
table_before, keras_before = attributes(names), everything_in_keras()
assert len(keras_before) > 10000
import tfdist
"""

FIRST_STRATEGY = """
assert all(now is before for now, before in zip(attributes(names), table_before, strict=True))
assert changed(keras_before) == []
layer = tfdist.optimizers.elementwise(type("Own", (keras.optimizers.SGD,), {}))
assert changed(keras_before) == []

cpus = tfdist.use_logical_cpus(2)
try:
    tfdist.ShardedStrategy(cpus, zero_stage=7)
except ValueError:
    assert changed(keras_before) == [], "a strategy that is refused installs nothing"
tfdist.ShardedStrategy(cpus)
first = attributes(names)
for name, now, before in zip(names, first, table_before, strict=True):
    assert now is not before, name
    assert getattr(now, "_tfdist_original", before) is before, name
tfdist.ShardedStrategy(cpus[:1])
assert all(now is then for now, then in zip(attributes(names), first, strict=True)), "installed once"
print("seen")
"""


def test_keras_is_untouched_until_the_first_strategy():
    names = json.dumps([(row.owner, row.name) for row in TABLE.rows])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", BEGIN + FIRST_STRATEGY, names]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.endswith("seen\n")


def save_a_plain_model():
    keras.utils.set_random_seed(1)
    own = keras.Sequential([keras.Input((3,)), tfdist.layers.ColumnParallelDense(4), tfdist.layers.RowParallelDense(1)])
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    own.save("own.keras")
    plain.load_weights("own.keras")
    own.compile("sgd", "mse")
    plain.compile("sgd", "mse")
    x, y = np.ones((6, 3), "float32"), np.ones((6, 1), "float32")
    assert np.isclose(own.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0))


def load_it():
    loaded = keras.models.load_model("own.keras")
    assert type(loaded.layers[0]) is tfdist.layers.ColumnParallelDense
    assert any(weight.numpy().any() for weight in loaded.weights)


def test_parallel_layers_in_a_plain_model(tmp_path):
    """In processes that have imported tfdist, and no more."""
    for function in (save_a_plain_model, load_it):
        process = forks.start(function, environment=dict(os.environ), folder=tmp_path, output=tmp_path / "output.txt")
        try:
            assert process.wait(100) == 0, (tmp_path / "output.txt").read_text()
        finally:
            process.kill()
