"""Planned memory against the bytes of tensors that steps of `fit` hold, as TensorFlow's profiler notes them.

Models are trained in processes of their own, where nothing else is allocated and freed. All ways to train:
`python benchmarks/planning_memory.py`, whose table is in docs/planning.md.
"""

import dataclasses
import functools
import json
import os
import statistics

import pytest

from benchmarks import planning_memory
from tests import forks
from tfdist.tools.planning import Candidate, plan
from tfdist.tools.planning.data_sheets import from_sheet

EXHAUSTIVE = pytest.mark.exhaustive
CASES = [
    ("two_outputs", "one"),
    pytest.param("mlp", "zero3", marks=EXHAUSTIVE),
    pytest.param("cnn", "zero2", marks=EXHAUSTIVE),
    pytest.param("gpt", "one", marks=EXHAUSTIVE),
    pytest.param("gpt", "zero3", marks=EXHAUSTIVE),
    pytest.param("gpt", "1f1b", marks=EXHAUSTIVE),
    pytest.param("gpt", "tensor", marks=EXHAUSTIVE),
]
EDGE = 0.05


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    @functools.cache
    def peak(name, way):
        if way != "one":
            return statistics.median(planning_memory.measured(name, way, planning_memory.MODELS[name][1])["tensors"])
        folder = tmp_path_factory.mktemp(name)
        settings = {"environment": dict(os.environ), "folder": folder, "output": folder / "output.txt"}
        fork = forks.start(planning_memory.train_and_tell, name, way, planning_memory.MODELS[name][1], **settings)
        assert fork.wait(200) == 0, settings["output"].read_text()
        told = settings["output"].read_text().partition("RESULT ")[2]
        return statistics.median(json.loads(told.splitlines()[0])["tensors"])

    return peak


@pytest.mark.parametrize("name, way", CASES)
def test_planned_peak_is_that_of_a_step(name, way, measured):
    planned = planning_memory.planned(name, Candidate(**planning_memory.WAYS[way]), planning_memory.MODELS[name][1]).together
    assert 0.9 <= planned / measured(name, way) <= 1.1


@pytest.mark.parametrize("name, way", [("two_outputs", "one"), pytest.param("mlp", "zero3", marks=EXHAUSTIVE)])
def test_fit_or_not_fit_is_right_at_the_edge(name, way, measured):
    """With 5 % more memory than a step takes the plan fits, with 5 % less it does not."""
    build, examples = planning_memory.MODELS[name]
    wanted = Candidate(**planning_memory.WAYS[way])
    cpu = dataclasses.replace(from_sheet("h100"), name="CPU")

    def fits(memory):
        given = {"devices": wanted.devices, "batch_size": examples * wanted.data, "zero_stages": (wanted.zero_stage,)}
        found = plan(build, memory_per_device=int(memory), hardware=cpu, **given)
        (planned,) = [one for one in found.candidates if one.candidate == wanted]
        return planned.fits

    assert fits(measured(name, way) * (1 + EDGE))
    assert not fits(measured(name, way) * (1 - EDGE))
