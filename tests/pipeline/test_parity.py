"""A pipelined model trains as on one device that is fed the same microbatches, whatever the schedule and the mesh."""

import functools

import keras
import pytest
from grids import exhaustive
from ranks import strategy_on
from training import one_device

from tests import workers
from tests.parity.comparison import assert_same_tree
from tests.pipeline import pipeline_models
from tests.pipeline.pipeline_models import custom_loop, train
from tests.pipeline.pipeline_worker_cases import CASES

pytestmark = [pytest.mark.as_traced, pytest.mark.usefixtures("float64")]


@functools.cache
def on_one_device(name, num_microbatches, optimizer=None):
    return train(one_device(), name, OPTIMIZERS.get(optimizer, pipeline_models.momentum), num_microbatches=num_microbatches)


def assert_is_one_device(found, name, num_microbatches, optimizer=None):
    expected = on_one_device(name, num_microbatches, optimizer)
    assert_same_tree(found, {key: expected[key] for key in found})


def mesh(pipe, data=1, **settings):
    return strategy_on(pipe * data, pipeline_parallel_size=pipe, **settings)


@pytest.mark.parametrize("name", ["branches", "masked", "tied"])
def test_microbatches_on_one_device_are_the_plain_model(name):
    """Without dropout and BatchNormalization."""
    assert_same_tree(on_one_device(name, 4), train(one_device(), name))


# (model, pipe size, microbatches, schedule, stages per rank): m = p, 2 p and odd; every schedule.
GRID = [
    ("chain", 2, 2, "gpipe", 1),
    ("chain", 2, 4, "1f1b", 1),
    ("chain", 4, 8, "zero_bubble", 1),
    ("branches", 2, 4, "zero_bubble", 1),
    ("branches", 4, 4, "gpipe", 1),
    ("branches", 4, 3, "1f1b", 1),
    exhaustive("branches", 2, 3, "interleaved", 2),
    ("branches", 2, 4, "interleaved", 3),
    ("masked", 2, 4, "interleaved", 2),
    exhaustive("masked", 2, 4, "zero_bubble", 1),
    exhaustive("masked", 4, 4, "1f1b", 1),
    ("tied", 4, 8, "1f1b", 1),
    exhaustive("tied", 2, 4, "interleaved", 2),
]


@pytest.mark.parametrize(("name", "pipe", "num_microbatches", "schedule", "stages_per_rank"), GRID)
def test_parity(name, pipe, num_microbatches, schedule, stages_per_rank):
    settings = {"num_microbatches": num_microbatches, "schedule": schedule, "stages_per_rank": stages_per_rank}
    found = train(mesh(pipe, zero_stage=0), name, infers=pipe == 4 or schedule == "interleaved", **settings)
    assert_is_one_device(found, name, num_microbatches)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_data_ranks(zero_stage):
    """A rank of two feeds half of a batch in microbatches that are as large as those of one device in twice as many."""
    strategy = mesh(2, 2, zero_stage=zero_stage)
    assert_is_one_device(train(strategy, "branches", infers=zero_stage == 2, num_microbatches=4), "branches", 8)
    if zero_stage != 1:
        assert_is_one_device(train(strategy, "masked", infers=zero_stage == 0, num_microbatches=2), "masked", 4)


@pytest.mark.parametrize(
    ("name", "pipe", "schedule"), [("chain", 2, "zero_bubble"), ("masked", 2, "gpipe"), ("branches", 1, "1f1b")]
)
def test_recomputing_changes_nothing(name, pipe, schedule):
    """Neither random numbers nor statistics, which belong to the first forward."""
    found = train(mesh(pipe, zero_stage=0), name, infers=False, num_microbatches=4, schedule=schedule, recompute=True)
    assert_is_one_device(found, name, 4)


def test_statistics_of_data_ranks():
    """Moving statistics are averaged over data ranks, and random numbers are theirs, as without a pipeline."""
    expected = train(strategy_on(2, zero_stage=0), "chain", num_microbatches=4)
    assert_same_tree(train(mesh(2, 2, zero_stage=0), "chain", num_microbatches=4), expected)


def test_a_custom_loop():
    """Also before anything has made the metrics."""
    for name in ("tied", "branches"):
        found = custom_loop(mesh(2, 2, zero_stage=1), name, num_microbatches=2)
        assert_same_tree(found, custom_loop(one_device(), name, num_microbatches=4))


OPTIMIZERS = {
    "clipped by norm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05),
    "clipped by global norm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
    "averaged": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulated": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "loss scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)),
    "whole-tensor": lambda: keras.optimizers.Adafactor(0.05),
}


@pytest.mark.parametrize(("optimizer", "data", "zero_stage"), [(name, 1 + n % 2, n % 3) for n, name in enumerate(OPTIMIZERS)])
def test_what_an_optimizer_is_asked_for(optimizer, data, zero_stage):
    strategy = mesh(2, data, zero_stage=zero_stage)
    found = train(strategy, "branches", OPTIMIZERS[optimizer], infers=False, num_microbatches=4 // data)
    assert_is_one_device(found, "branches", 4, optimizer)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [1, 2, 4])
def test_other_processes(number, tmp_path):
    """One with 8 devices, two with one each, four with two each."""
    target = "tests.pipeline.pipeline_worker_cases:train_all"
    with workers.job(tmp_path, number, target, number, devices_per_worker={1: 8, 2: 1, 4: 2}[number]) as job:
        expected = {case: on_one_device(*key) for case, (key, _, _) in CASES[number].items()}
        if number == 2:
            expected["custom loop"] = custom_loop(one_device(), "tied", num_microbatches=4)
        for found in job.results(280):
            assert list(found) == list(expected)
            for case, result in found.items():
                assert_same_tree(result, expected[case], case)
