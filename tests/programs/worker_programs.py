"""Programs of this folder that two workers run."""

from __future__ import annotations

import functools
import pathlib
import sys
import warnings
from typing import Any

import keras

import tfdist

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))  # as pytest has it, where tests are imported

from tests.programs.branches import test_branches_of_loops, test_steps_in_branches
from tests.programs.comparing import Program, run
from tests.programs.losses import test_over_global_batch
from tests.programs.memory import test_recomputation_of_models
from tests.programs.models import test_models_that_share, test_sequence_models, test_unusual_layers
from tests.programs.rows.ways_of_training import Case, under_workers
from tests.programs.saving import test_deferred_restore, test_exports

PROGRAMS: dict[str, Program] = {
    "branches": test_steps_in_branches.fitted(test_steps_in_branches.TrainsInABranch),
    "several branches": test_steps_in_branches.fitted(test_steps_in_branches.OneOfSeveral, "accumulating"),
    "adversaries": test_branches_of_loops.adversaries,
}
LOSSES: dict[str, Program] = {
    "two towers": test_over_global_batch.STEPPING["traced"],
    "weighted root": test_over_global_batch.FITTED["weighted root"],
}
EXAMPLES: dict[str, Program] = {
    "forward only": test_unusual_layers.forward_forward,
    "recommender": test_sequence_models.recommender,
    "adversaries, batch by batch": test_models_that_share.adversaries_batch_by_batch,
}


def run_examples(stage: int) -> dict[str, Any]:
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=stage)
    return {name: run(program, strategy) for name, program in EXAMPLES.items()}


def run_losses(stage: int) -> dict[str, Any]:
    keras.config.set_floatx("float64")
    strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=stage)
    return {name: run(program, strategy) for name, program in LOSSES.items()}


def run_functions(cases: list[tuple[Case, int]], settings: dict[str, Any]) -> list[tuple[dict[str, Any], list[str]]]:
    """Functions of the batch (see `functions_of_the_batch`), each case at its stage: what it leaves, and what is told of it."""
    keras.config.set_floatx("float64")
    return [under_workers(case, stage, **settings) for case, stage in cases]


def run_recomputed() -> Any:
    keras.config.set_floatx("float64")
    return run(test_recomputation_of_models.dense_blocks, tfdist.MultiWorkerShardedStrategy(zero_stage=3))


def run_all(folder: str, stages: list[int]) -> dict[str, Any]:
    # What `BatchNormalization(synchronized=True)` assigns is the same on all workers.
    warnings.filterwarnings("error", message=".*is assigned what a device has computed")
    found: dict[str, Any] = {}
    for stage in stages:
        strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=stage)
        for name, program in PROGRAMS.items():
            found[f"{name}, {stage}"] = run(program, strategy)
        # TensorFlow's checkpoints: of each worker in a folder of its own, then of the chief for all.
        saved = pathlib.Path(folder) / (f"own_{strategy.cluster.worker_index}" if stage == 1 else "of_all")
        program = functools.partial(test_deferred_restore.going_on, optimizer="adam", folder=str(saved))
        found[f"restored, {stage}"] = run(program, strategy)
        model = run(test_exports.dense, strategy)
        shared = pathlib.Path(folder) / f"stage_{stage}"
        shared.mkdir(exist_ok=True)
        found[f"exported, {stage}"] = model.predict(test_exports.X, verbose=0)
        test_exports.exported(model, shared, but=())
    return found
