"""A `fit` that goes on from the middle of an epoch and of an accumulation ends as if it had never stopped, bit by bit."""

import math
import warnings

import keras
import pytest
from grids import exhaustive

import tfdist
from tests.extensions.resuming import restarted_fits
from tests.extensions.resuming.restarted_fits import OPTIMIZERS
from tests.workers import job

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300)]

SETTINGS = {
    "layers": [{"zero_stage": stage} for stage in range(4)],
    "lora": [{"zero_stage": 0}, {"zero_stage": 3}],
    "plan": [{"zero_stage": 1, "tensor_parallel_size": 2}, {"zero_stage": 3, "tensor_parallel_size": 2}],
    "pipeline": [{"zero_stage": 1, "pipeline_parallel_size": 2}, {"zero_stage": 3, "pipeline_parallel_size": 2}],
    "blocks": [{"zero_stage": 0, "pipeline_parallel_size": 2}, {"zero_stage": 3, "pipeline_parallel_size": 2}],
}
BY_DEFAULT = ("layers", "scaled", SETTINGS["layers"][3])  # a pipeline: over workers, below
CASES = [
    (model, optimizer, settings)
    for model in SETTINGS
    for optimizer in OPTIMIZERS
    for settings in SETTINGS[model]
    if not (optimizer == "several" and model in ("pipeline", "blocks"))  # Keras's wants all gradients of the model at once
    # Keras's Adafactor makes NaN of a gradient with a row and a column of zeros, as one row behind BatchNormalization has.
    and not (optimizer == "adafactor" and model == "pipeline")
]
GRID = [case if case == BY_DEFAULT else exhaustive(*case) for case in CASES]


def on(cpus, settings):
    ranks = 2 * math.prod(size for name, size in settings.items() if name.endswith("size"))
    return tfdist.ShardedStrategy(cpus[:ranks], **settings)


@pytest.mark.parametrize(("model", "optimizer", "settings"), GRID, ids=str)
def test_models_and_optimizers(model, optimizer, settings, tmp_path, cpus):
    assert restarted_fits.differences(on(cpus, settings), model, optimizer, tmp_path) == []


@pytest.mark.parametrize(("save_freq", "zero_stage"), [("epoch", 0), exhaustive("epoch", 3), exhaustive(2, 3)])
def test_averages_that_are_swapped(save_freq, zero_stage, tmp_path, cpus):
    def swap():
        return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)

    strategy = on(cpus, {"zero_stage": zero_stage})
    assert restarted_fits.differences(strategy, "layers", "averages", tmp_path, save_freq, [swap], step=7) == []


@pytest.mark.parametrize("zero_stage", [3, exhaustive(0), exhaustive(1)])
def test_optimizers_beside_that_of_the_model(zero_stage, tmp_path, cpus):
    """They began anew: Keras builds `model.optimizer` alone, and loads no state into one that is not built."""
    with warnings.catch_warnings(action="error", category=UserWarning):
        assert restarted_fits.differences(on(cpus, {"zero_stage": zero_stage}), "pair", "momentum", tmp_path) == []


# Two workers: many in one job, because its start takes longest.

JOBS = [("pipeline", "accumulating", {"zero_stage": 1, "pipeline_parallel_size": 2})]
MORE_JOBS = [
    (model, optimizer, settings)
    for model, optimizer in [
        ("layers", "scaled"),
        ("layers", "several"),
        ("layers", "muon"),
        ("lora", "accumulating"),
        ("plan", "scaled"),
        ("pipeline", "scaled"),
        ("blocks", "averages"),
    ]
    for settings in SETTINGS[model]
]


def restarted_together(folder, cases):
    """On every worker: returns what differs, by case."""
    found = {}
    for number, (model, optimizer, settings) in enumerate(cases):
        strategy = tfdist.MultiWorkerShardedStrategy(**settings)
        found[model, optimizer, str(settings)] = restarted_fits.differences(strategy, model, optimizer, f"{folder}/{number}")
    return found


@pytest.mark.parametrize(
    ("workers", "devices", "cases"),
    [(2, 1, JOBS), *(exhaustive(2, 2, MORE_JOBS[start::6]) for start in range(6))],
    ids=["few", *map("part {}".format, range(1, 7))],
)
def test_workers(workers, devices, cases, tmp_path):
    target = "tests.extensions.resuming.test_restarted_fits:restarted_together"
    with job(tmp_path, workers, target, str(tmp_path / "backups"), cases, devices_per_worker=devices) as running:
        for found in running.results(280):
            assert found == {(model, optimizer, str(settings)): [] for model, optimizer, settings in cases}
