"""What stands in Keras and TensorFlow before tfdist is imported, after that, and when it is used first; in fresh processes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

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
