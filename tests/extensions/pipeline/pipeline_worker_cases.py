"""What the workers of the pipeline tests run."""

from __future__ import annotations

from typing import Any

import keras

import tfdist
from tests.extensions.pipeline.pipeline_models import custom_loop, train

MESH = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}  # and 2 data ranks

# By the number of workers: a name, (the model, on one device as many microbatches of the same size), whether it infers, the
# strategy's settings, and the pipeline's settings.
CASES: dict[int, dict[str, tuple[tuple[str, int], bool, dict[str, Any], dict[str, Any]]]] = {
    1: {
        "cut between stages": (
            ("sequence parallel", 4),
            False,
            {**MESH, "zero_stage": 2},
            {"num_microbatches": 2, "schedule": "zero_bubble"},
        ),
        "stage 3": (("sequence parallel", 4), False, {**MESH, "zero_stage": 3}, {"num_microbatches": 2}),
    },
    2: {
        "1f1b": (("chain", 4), False, {"pipeline_parallel_size": 2, "zero_stage": 0}, {"num_microbatches": 4}),
        "interleaved": (
            ("tied", 4),
            False,
            {"pipeline_parallel_size": 2, "zero_stage": 0},
            {"num_microbatches": 4, "schedule": "interleaved", "stages_per_rank": 2},
        ),
    },
    4: {
        "zero bubble": (
            ("branches", 4),
            False,
            {"pipeline_parallel_size": 4, "zero_stage": 0},
            {"num_microbatches": 2, "schedule": "zero_bubble"},
        ),
        "stage 3": (
            ("branches", 4),
            False,
            {"pipeline_parallel_size": 2, "zero_stage": 3},
            {"num_microbatches": 2, "reshard_after_microbatch": True},
        ),
        "2 x 2 x 2": (("tensor parallel", 4), True, {**MESH, "zero_stage": 1}, {"num_microbatches": 2}),
    },
}


def train_all(number: int) -> dict[str, dict[str, Any]]:
    keras.config.set_floatx("float64")
    found = {}
    for case, ((name, _), infers, settings, pipeline) in CASES[number].items():
        strategy = tfdist.MultiWorkerShardedStrategy(**settings)
        found[case] = train(strategy, name, infers=infers, **pipeline)
    if number == 2:
        found["custom loop"] = custom_loop(strategy, name, num_microbatches=2)
    return found
