"""The cases of a suite: who takes part in what, in which order."""

import dataclasses
import math

import pytest

from benchmarks import suites
from benchmarks.cases import STAGES, Case
from benchmarks.suites import CONTENDERS, SUITES, select
from tfdist.sharding import placements_of


def all_of(name, **changes):
    return select(**{**dataclasses.asdict(SUITES[name]), **changes})


def test_the_full_suite_has_every_contender_in_every_round():
    measures = all_of("full")
    for round_index in range(SUITES["full"].rounds):
        for model in ("small", "wide"):
            own = [x for x in measures if (x.kind, x.model, x.round_index) == ("speed", model, round_index)]
            keras = {f"zero{stage}-keras" for stage in (1, 2, 3)} if model == "wide" else set()  # no kernel has a part in it
            singles = {(contender, 1) for contender in ("single", "torch-single")}
            others = {(x, ranks) for x in {*CONTENDERS} - {"single", "torch-single"} - keras for ranks in (2, 4)}
            assert {(x.contender, x.ranks) for x in own} == singles | others
            assert len(own) == len(singles | others)


def test_no_measurement_is_there_twice():
    measures = all_of("full")
    assert len(set(measures)) == len(measures)


def test_the_quick_suite_is_speed_on_two_ranks():
    measures = all_of("quick")
    assert {x.kind for x in measures} == {"speed"}
    assert {x.ranks for x in measures} == {1, 2}
    names = {x.contender for x in measures}
    assert names >= {"single", "mw-mirrored", "zero1", "zero2", "zero3", "ddp", "fsdp2", "ds1", "ds3"}
    assert {x.model for x in measures if x.contender.endswith("-keras")} == {"small"}


def test_rounds_come_one_after_the_other_and_the_order_rotates():
    measures = all_of("quick", models=("small",), rounds=3)
    assert [x.round_index for x in measures] == sorted(x.round_index for x in measures)
    orders = [[x.contender for x in measures if x.ranks == 2 and x.round_index == number] for number in range(3)]
    assert orders[1] == [*orders[0][1:], orders[0][0]]
    assert orders[2] == [*orders[1][1:], orders[1][0]]


def test_memory_is_measured_once():
    assert {x.round_index for x in all_of("full", kinds=("memory",))} == {0}


def test_memory_of_one_process_is_that_of_the_scaling():
    found = {x.contender for x in all_of("full", kinds=("memory",))}
    assert found & {"mirrored", *suites.LOCAL} == set(suites.SCALING_CONTENDERS)


def test_scaling_is_of_depths_in_one_process():
    measures = all_of("full", kinds=("scaling",), rounds=1)
    assert {(x.contender, x.layers) for x in measures} == {
        (contender, layers) for contender in ("mirrored", "local-zero1", "local-zero3") for layers in (4, 8, 16, 32)
    }
    assert {x.case.num_processes for x in measures} == {1}
    assert {x.layers: x.steps for x in measures} == {4: 80, 8: 40, 16: 20, 32: 10}  # about as long
    assert all_of("full", kinds=("scaling",), ranks=(2,)) == []


@pytest.mark.parametrize("contender", CONTENDERS)
def test_processes_of_a_contender(contender):
    (measure, *_) = all_of("full", kinds=("speed",), contenders=(contender,), ranks=(4,), rounds=1)
    case = measure.case
    processes = 1 if contender in ("single", "torch-single", "mirrored", *suites.LOCAL) else 4
    assert case.num_processes == processes
    assert case.is_torch == (suites.package_of(contender) is not None)
    assert (suites.package_of(contender) == "deepspeed") == contender.startswith("ds")
    assert Case(**dataclasses.asdict(case)) == case
    assert case.use_kernels == (False if contender.endswith("-keras") else None)


def test_parameters_of_the_sizes():
    small, wide = suites.SIZES["small"], suites.SIZES["wide"]
    width, vocabulary = small["width"], small["vocabulary"]
    block = 4 * (width**2 + width) + 2 * 4 * width**2 + 5 * width + 2 * 2 * width
    gpt = 2 * vocabulary * width + vocabulary + small["sequence_length"] * width + small["layers"] * block + 2 * width
    assert gpt == 7_394_816
    assert wide["layers"] * (wide["width"] ** 2 + wide["width"]) == 33_570_816


def test_tokens_of_a_step():
    (small,) = all_of("quick", contenders=("single",), models=("small",), rounds=1)
    (wide,) = all_of("quick", contenders=("single",), models=("wide",), rounds=1)
    assert (small.examples_per_step, wide.examples_per_step) == (16 * 128, 64)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("contender", STAGES)
def test_the_floor_is_the_formula_of_the_stage(contender, ranks):
    case = Case(contender, "mlp", ranks, layers=1, width=1, global_batch_size=4)
    placements = placements_of(STAGES[contender])
    assert math.isclose(case.floor_bytes_per_parameter, placements.bytes_per_parameter(ranks))
