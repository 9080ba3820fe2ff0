"""What the workers of the tensor-parallel tests run."""

from __future__ import annotations

from typing import Any

import keras

import tfdist
from tests.extensions.tensor.tensor_models import train


def train_all(cases: list[tuple[str, int]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Trains each model with its stage."""
    keras.config.set_floatx("float64")
    found = {}
    for name, stage in cases:
        strategy = tfdist.MultiWorkerShardedStrategy(tensor_parallel_size=2, zero_stage=stage)
        found[name, stage] = train(strategy, name, infers=stage == 0)
    return found
