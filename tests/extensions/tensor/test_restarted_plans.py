"""A `fit` of a model that a plan shards goes on from the middle of an epoch as if it had never stopped, bit by bit."""

import pytest

import tfdist
from tests.extensions.resuming import restarted_fits
from tests.extensions.resuming.restarted_fits import OPTIMIZERS, assert_no_differences
from tests.training import on_two_data_ranks

pytestmark = [pytest.mark.exhaustive, pytest.mark.as_traced, pytest.mark.timeout(300)]

SETTINGS = [{"zero_stage": 1, "tensor_parallel_size": 2}, {"zero_stage": 3, "tensor_parallel_size": 2}]


def by_plan():
    model = restarted_fits.layers()
    tfdist.parallelize(model, {"up": "column", "down": "row"}, print_fn=None)
    return model


MODELS = {"plan": by_plan}


def restarted_together(folder, cases):
    return restarted_fits.restarted_together(folder, cases, MODELS)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("model", "optimizer"), [("plan", optimizer) for optimizer in OPTIMIZERS])
def test_models_and_optimizers(model, optimizer, settings, tmp_path, cpus):
    assert restarted_fits.differences(on_two_data_ranks(cpus, settings), MODELS[model], optimizer, tmp_path) == []


def test_workers(tmp_path):
    cases = [("plan", "scaled", settings) for settings in SETTINGS]
    assert_no_differences(tmp_path, "tests.extensions.tensor.test_restarted_plans:restarted_together", 2, cases)
