"""What the workers of the tensor-parallel tests run."""

from __future__ import annotations

from typing import Any

import keras

import tfdist
from tests.layers.tensor_models import train

# A model and a stage of every worker's strategy.
CASES = (("transformer", 0), ("dense", 1), ("dense", 2), ("sequence parallel", 3))


def train_all() -> dict[tuple[str, int], dict[str, Any]]:
    keras.config.set_floatx("float64")
    found = {}
    for name, stage in CASES:
        strategy = tfdist.MultiWorkerShardedStrategy(tensor_parallel_size=2, zero_stage=stage)
        found[name, stage] = train(strategy, name, infers=stage == 0)
    return found
