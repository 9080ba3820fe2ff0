"""What the workers of the tensor-parallel tests run."""

from __future__ import annotations

from typing import Any

import keras

import tfdist
from tests.layers.tensor_models import train

CASES = (("transformer", True), ("sequence parallel", False))  # a model, and whether it infers


def train_all() -> dict[tuple[str, str], dict[str, Any]]:
    keras.config.set_floatx("float64")
    found = {}
    infers = dict(CASES)
    for name, stage in (("transformer", 0), ("transformer", 1), ("transformer", 2), ("transformer", 3), ("sequence parallel", 3)):
        strategy = tfdist.MultiWorkerShardedStrategy(tensor_parallel_size=2, zero_stage=stage)
        found[name, f"{name}, stage {stage}"] = train(strategy, name, infers=infers[name])
    return found
