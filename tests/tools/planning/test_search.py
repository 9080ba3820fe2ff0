"""What is enumerated, and what is chosen."""

import dataclasses

import pytest

from tests.tools.planning.fake_estimates import memory_of, time_of
from tfdist.tools.planning.search import SCHEDULES, Choices, divisors, search
from tfdist.tools.planning.step_time import StepTime


def names(**settings):
    return [one.name() for one in Choices(**settings).candidates()]


def test_stages_over_data_ranks():
    assert names(devices=4, batch_size=8, recompute=False) == ["zero 0", "zero 1", "zero 2", "zero 3"]
    assert names(devices=1, batch_size=7) == ["zero 0", "zero 0, recompute"]


def test_all_devices_and_the_whole_batch_are_divided():
    settings = {"devices": 4, "batch_size": 4, "tensor_sizes": (1, 2, 4), "pipeline_sizes": (1, 2), "recompute": False}
    found = list(Choices(**settings).candidates())
    assert all(one.devices == 4 and 4 % (one.data * one.microbatches) == 0 for one in found)
    assert {(one.data, one.tensor, one.pipeline) for one in found} == {(4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2)}
    assert {one.schedule for one in found if one.pipeline > 1} == set(SCHEDULES)
    assert len(set(found)) == len(found)


def test_microbatches_divide_a_replicas_rows():
    found = [
        one.microbatches
        for one in Choices(devices=2, batch_size=24, pipeline_sizes=(2,), schedules=("1f1b",), recompute=False).candidates()
    ]
    assert found == [2, 3, 4, 6, 8, 12]  # not more than eight for each stage


def test_groups_and_compression():
    settings = {"sharding_group_sizes": (2, 8), "gradient_compressions": (None, "int8"), "recompute": False}
    compressed = "int8 gradients"
    assert names(devices=8, batch_size=8, zero_stages=(0, 3), **settings) == [
        "zero 0",
        f"zero 0, {compressed}",
        "zero 3",
        f"zero 3, {compressed}",
        "zero 3, groups of 2",
        f"zero 3, groups of 2, {compressed}",
    ]


def test_compressed_parameters_are_those_of_stage_3():
    settings = {"gradient_compressions": (None, "int8"), "parameter_compressions": (None, "bfloat16"), "recompute": False}
    assert names(devices=2, batch_size=2, zero_stages=(2, 3), **settings) == [
        "zero 2",
        "zero 2, int8 gradients",
        "zero 3",
        "zero 3, bfloat16 parameters",
        "zero 3, int8 gradients",
        "zero 3, int8 gradients, bfloat16 parameters",
    ]


def test_several_stages_a_rank():
    settings = {"devices": 2, "batch_size": 2, "pipeline_sizes": (2,), "stages_per_rank": (2, 3), "recompute": False}
    found = [one.stages for one in Choices(**settings, most_stages=4, schedules=("1f1b", "interleaved")).candidates()]
    assert found == [2, 4]
    assert "pipeline 2 interleaved x 2 of 4 stages" in names(**settings)[-2]


def test_of_plans_as_fast_as_one_another_the_one_with_the_fewest_means_comes_first():
    choices = Choices(devices=4, batch_size=8, pipeline_sizes=(1, 2), schedules=("1f1b",), zero_stages=(0,), recompute=False)
    for saved, pipeline in ((0.03, 1), (0.2, 2)):

        def time(candidate, saved=saved):
            return StepTime(1.0, 0.0, 0.0, 0.0, 1 - saved * (candidate.pipeline > 1))

        found = search(choices, 400, memory_of, time)
        assert found[0].candidate.pipeline == pipeline
        others = [one.time.together for one in found[1:]]
        assert others == sorted(others) and len(found) == len({one.candidate for one in found})


def test_the_fastest_that_fits_comes_first():
    choices = Choices(devices=4, batch_size=8)
    order = [one.candidate.name() for one in search(choices, 400, memory_of, time_of)]
    assert order[:2] == ["zero 0", "zero 1"] and order[-1] == "zero 3, recompute"
    found = search(choices, 250, memory_of, time_of)
    fitting = [one.candidate.name() for one in found if one.fits]
    assert fitting == ["zero 2", "zero 3", "zero 2, recompute", "zero 3, recompute"]
    others = [(one.candidate.name(), one.missing_bytes) for one in found if not one.fits]
    assert others == [("zero 1, recompute", 25), ("zero 1", 75), ("zero 0, recompute", 100), ("zero 0", 150)]
    assert all((one.time is None) is not one.fits for one in found)


def test_a_batch_that_no_plan_divides():
    cases = (
        (Choices(devices=8, batch_size=7, tensor_sizes=(1, 2)), 8),
        (Choices(devices=4, batch_size=1, pipeline_sizes=(1, 2, 4)), 4),  # one example fills no pipeline of four stages
        (Choices(devices=7, batch_size=16), 14),
    )
    for choices, nearest in cases:
        with pytest.raises(ValueError, match=rf"a plan divides.*Received: batch_size={choices.batch_size}. Take {nearest},"):
            search(choices, 400, memory_of, time_of)
        assert list(dataclasses.replace(choices, batch_size=nearest).candidates())


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
