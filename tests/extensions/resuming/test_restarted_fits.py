"""A `fit` that goes on from the middle of an epoch and of an accumulation ends as if it had never stopped, bit by bit."""

import warnings

import keras
import pytest
from grids import exhaustive

from tests.extensions.resuming import restarted_fits
from tests.extensions.resuming.restarted_fits import MODELS, OPTIMIZERS, Pair, assert_no_differences
from tests.training import on_two_data_ranks

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300)]

SETTINGS = {
    "layers": [{"zero_stage": stage} for stage in range(4)],
    "lora": [{"zero_stage": 0}, {"zero_stage": 3}],
}
BY_DEFAULT = ("layers", "scaled", SETTINGS["layers"][3])
CASES = [(model, optimizer, settings) for model in SETTINGS for optimizer in OPTIMIZERS for settings in SETTINGS[model]]
GRID = [case if case == BY_DEFAULT else exhaustive(*case) for case in CASES]


@pytest.mark.parametrize(("model", "optimizer", "settings"), GRID, ids=str)
def test_models_and_optimizers(model, optimizer, settings, tmp_path, cpus):
    assert restarted_fits.differences(on_two_data_ranks(cpus, settings), MODELS[model], optimizer, tmp_path) == []


@pytest.mark.parametrize(("save_freq", "zero_stage"), [("epoch", 0), exhaustive("epoch", 3), exhaustive(2, 3)])
def test_averages_that_are_swapped(save_freq, zero_stage, tmp_path, cpus):
    def swap():
        return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)

    strategy = on_two_data_ranks(cpus, {"zero_stage": zero_stage})
    assert restarted_fits.differences(strategy, MODELS["layers"], "averages", tmp_path, save_freq, [swap], step=7) == []


@pytest.mark.parametrize("zero_stage", [3, exhaustive(0), exhaustive(1)])
def test_optimizers_beside_that_of_the_model(zero_stage, tmp_path, cpus):
    """They began anew: Keras builds `model.optimizer` alone, and loads no state into one that is not built."""
    with warnings.catch_warnings(action="error", category=UserWarning):
        assert restarted_fits.differences(on_two_data_ranks(cpus, {"zero_stage": zero_stage}), Pair, "momentum", tmp_path) == []


# Two workers: many in one job, because its start takes longest.

JOBS = [
    (model, optimizer, settings)
    for model, optimizer in [("layers", "scaled"), ("layers", "several"), ("layers", "muon"), ("lora", "accumulating")]
    for settings in SETTINGS[model]
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", [JOBS[start::4] for start in range(4)], ids=map("part {}".format, range(1, 5)))
def test_workers(cases, tmp_path):
    assert_no_differences(tmp_path, "tests.extensions.resuming.restarted_fits:restarted_together", 2, cases)
