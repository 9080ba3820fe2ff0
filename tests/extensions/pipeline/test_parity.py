"""A pipelined model trains as on one device, whatever the schedule and the mesh.

The device is fed whole batches, or, where random numbers and statistics belong to a microbatch, the same microbatches.
"""

import functools

import keras
import pytest
from grids import exhaustive
from ranks import strategy_on
from training import one_device

from tests import workers
from tests.extensions.pipeline import pipeline_models
from tests.extensions.pipeline.pipeline_models import custom_loop, fitted, inferred, train
from tests.extensions.pipeline.pipeline_worker_cases import CASES
from tests.parity.comparison import assert_same_tree

pytestmark = [pytest.mark.as_traced, pytest.mark.usefixtures("float64")]


@functools.cache
def fitted_on_one_device(name, num_microbatches, optimizer):
    build = OPTIMIZERS.get(optimizer, pipeline_models.momentum)
    settings = {"num_microbatches": num_microbatches} if num_microbatches else {}
    return fitted(one_device(), name, build, **settings)


@functools.cache
def inferred_on_one_device(name, num_microbatches, optimizer):
    return inferred(fitted_on_one_device(name, num_microbatches, optimizer)[0], name)


def on_one_device(name, num_microbatches, optimizer=None, infers=True):
    num_microbatches = num_microbatches if name == "chain" else None
    found = fitted_on_one_device(name, num_microbatches, optimizer)[1]
    return {**found, **inferred_on_one_device(name, num_microbatches, optimizer)} if infers else found


def assert_is_one_device(found, name, num_microbatches, optimizer=None):
    assert_same_tree(found, on_one_device(name, num_microbatches, optimizer, infers="predict" in found))


def mesh(pipe, data=1, **settings):
    return strategy_on(pipe * data, pipeline_parallel_size=pipe, **settings)


@pytest.mark.parametrize("name", [exhaustive("branches"), exhaustive("masked"), exhaustive("tied")])
def test_microbatches_on_one_device_are_the_plain_model(name):
    """Without dropout and BatchNormalization."""
    found = train(one_device(), name, infers=name == "branches", num_microbatches=4)
    assert_is_one_device(found, name, 4)


# (model, pipe size, microbatches, schedule, stages per rank, infers): m = p, 2 p and odd; every schedule.
GRID = [
    exhaustive("chain", 2, 2, "gpipe", 1, False),
    exhaustive("chain", 2, 2, "gpipe", 1, True),
    exhaustive("chain", 2, 4, "1f1b", 1, False),  # the same runs in workers
    exhaustive("chain", 4, 4, "zero_bubble", 1, True),
    exhaustive("chain", 4, 8, "zero_bubble", 1, True),
    exhaustive("branches", 2, 4, "zero_bubble", 1, False),
    exhaustive("branches", 4, 4, "gpipe", 1, False),
    exhaustive("branches", 4, 3, "1f1b", 1, False),
    exhaustive("branches", 4, 3, "1f1b", 1, True),
    exhaustive("branches", 2, 3, "interleaved", 2, True),
    ("branches", 2, 4, "interleaved", 3, False),
    ("masked", 2, 4, "interleaved", 2, False),
    exhaustive("masked", 2, 4, "interleaved", 2, True),  # the tensor-parallel model with a mask does in workers
    exhaustive("masked", 2, 4, "zero_bubble", 1, False),
    exhaustive("masked", 4, 4, "1f1b", 1, True),
    ("recurrent", 2, 2, "gpipe", 1, False),
    exhaustive("recurrent", 2, 4, "zero_bubble", 1, False),
    ("tied", 4, 8, "1f1b", 1, False),
    exhaustive("tied", 2, 4, "interleaved", 2, True),
]


@pytest.mark.parametrize(("name", "pipe", "num_microbatches", "schedule", "stages_per_rank", "infers"), GRID)
def test_parity(name, pipe, num_microbatches, schedule, stages_per_rank, infers):
    settings = {"num_microbatches": num_microbatches, "schedule": schedule, "stages_per_rank": stages_per_rank}
    found = train(mesh(pipe, zero_stage=0), name, infers=infers, **settings)
    assert_is_one_device(found, name, num_microbatches)


# (model, stage, infers)
GRID_OF_DATA_RANKS = [
    exhaustive("branches", 0, False),
    exhaustive("branches", 1, False),
    ("branches", 2, True),
    exhaustive("masked", 0, False),
    exhaustive("masked", 0, True),
    exhaustive("masked", 2, False),
]


@pytest.mark.parametrize(("name", "zero_stage", "infers"), GRID_OF_DATA_RANKS)
def test_data_ranks(name, zero_stage, infers):
    """Each of two data ranks feeds half of a batch, in microbatches of its own."""
    found = train(mesh(2, 2, zero_stage=zero_stage), name, infers=infers, num_microbatches=2)
    assert_is_one_device(found, name, 4)


@pytest.mark.parametrize(
    ("name", "pipe", "schedule", "stages"),
    [exhaustive("chain", 2, "zero_bubble", None), ("masked", 2, "gpipe", [2]), exhaustive("branches", 1, "1f1b", None)],
)
def test_recomputing_changes_nothing(name, pipe, schedule, stages):
    """Neither random numbers nor statistics, which belong to the first forward; nor the mask of what arrives at an attention."""
    settings = {"num_microbatches": 4, "schedule": schedule, "stages": stages}
    found = train(mesh(pipe, zero_stage=0), name, infers=False, recompute=True, **settings)
    assert_is_one_device(found, name, 4)


@pytest.mark.exhaustive  # by default at stage 3: tests/extensions/pipeline/programs/test_stage_3_in_pipelines.py
def test_statistics_of_data_ranks():
    """Moving statistics are averaged over data ranks, and random numbers are theirs, as without a pipeline."""
    expected = train(strategy_on(2, zero_stage=0), "noisy", infers=False, num_microbatches=2)
    found = train(mesh(2, 2, zero_stage=0), "noisy", infers=False, num_microbatches=2, stages=[3])
    assert_same_tree(found, expected)


@pytest.mark.parametrize("name", ["plain", exhaustive("branches"), exhaustive("tied")])  # the last runs in workers, too
def test_a_custom_loop(name):
    """Also before anything has made the metrics."""
    found = custom_loop(mesh(2, 2, zero_stage=1), name, num_microbatches=2)
    assert_same_tree(found, custom_loop(one_device(), name, num_microbatches=1))


SGD = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
OPTIMIZERS = {
    "clipped by norm, loss scaled": lambda: keras.optimizers.LossScaleOptimizer(SGD(clipnorm=0.05)),
    "clipped by global norm": lambda: SGD(global_clipnorm=0.1),
    "averaged, accumulated": lambda: SGD(
        use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2, gradient_accumulation_steps=2
    ),
    "whole-tensor": lambda: keras.optimizers.Adafactor(0.05),
    "decayed": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
}


@pytest.mark.parametrize(
    ("optimizer", "data", "zero_stage"),
    [
        ("clipped by norm, loss scaled", 1, 0),
        ("clipped by global norm", 2, 1),
        ("averaged, accumulated", 2, 0),
        ("whole-tensor", 2, 2),
        exhaustive("decayed", 1, 0),
    ],
)
def test_what_an_optimizer_is_asked_for(optimizer, data, zero_stage):
    strategy = mesh(2, data, zero_stage=zero_stage)
    found = train(strategy, "plain", OPTIMIZERS[optimizer], infers=False, num_microbatches=2)
    assert_is_one_device(found, "plain", 2 * data, optimizer)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [exhaustive(1), 2, exhaustive(4)])
def test_other_processes(number, tmp_path):
    """One with 8 devices, two with one each, four with two each."""
    target = "tests.extensions.pipeline.pipeline_worker_cases:train_all"
    with workers.job(tmp_path, number, target, number, devices_per_worker={1: 8, 2: 1, 4: 2}[number]) as job:
        expected = {case: on_one_device(*key, infers=infers) for case, (key, infers, _, _) in CASES[number].items()}
        if number == 2:
            expected["custom loop"] = custom_loop(one_device(), "tied", num_microbatches=1)
        for found in job.results(280):
            assert list(found) == list(expected)
            for case, result in found.items():
                assert_same_tree(result, expected[case], case)
