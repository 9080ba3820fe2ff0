"""What the workers of the tensor-parallel tests run."""

from __future__ import annotations

from typing import Any

import keras

import tfdist
from tests.layers.tensor_models import numbers, train


def train_all() -> dict[tuple[str, str], dict[str, Any]]:
    keras.config.set_floatx("float64")
    found = {}
    for name, stage in (("transformer", 0), ("transformer", 1), ("transformer", 2), ("transformer", 3), ("sequence parallel", 3)):
        strategy = tfdist.MultiWorkerShardedStrategy(tensor_parallel_size=2, zero_stage=stage)
        found[name, f"{name}, stage {stage}"] = numbers(train(strategy, name))
    return found
