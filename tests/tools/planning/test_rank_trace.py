"""One rank, traced with the others absent, against the same rank of a strategy whose devices are all there."""

import dataclasses
import os
import re

import keras
import pytest
import three_axes
from test_planned_memory import BLOCKS, LOSS, mixed, text, traced
from test_sent_bytes import ALONE, EXHAUSTIVE, GROUPS, strategy_of_a_step
from training import mlp

from tests import forks
from tfdist.tools.planning import Candidate
from tfdist.tools.planning.dry_run import dry_run_of, memory_of_trace
from tfdist.tools.planning.memory import state_of
from tfdist.tools.planning.rank_trace import Job, trace_rank
from tfdist.tools.planning.traced_model import trace

PIPELINE = {"pipeline": 2, "schedule": "1f1b", "microbatches": 4}


def named_alike(records):
    """Returns records whose labels do not have the numbers that Keras gives layers of one class."""
    return [dataclasses.replace(one, label=re.sub(r"_\d+\b", "", one.label)) for one in records]


@pytest.mark.parametrize(
    "build, candidate",
    [
        pytest.param(mixed, Candidate(zero_stage=0, data=2), marks=EXHAUSTIVE),
        pytest.param(mixed, Candidate(zero_stage=1, data=4), marks=EXHAUSTIVE),
        pytest.param(mlp, Candidate(zero_stage=2, data=4), marks=EXHAUSTIVE),
        (mlp, Candidate(zero_stage=3, data=2)),
        pytest.param(mixed, Candidate(zero_stage=3, data=2), marks=EXHAUSTIVE),
        pytest.param(text, Candidate(zero_stage=3, data=4), marks=EXHAUSTIVE),
        pytest.param(text, Candidate(zero_stage=2, data=2, gradient_compression="int8"), marks=EXHAUSTIVE),
        pytest.param(text, Candidate(zero_stage=0, tensor=2), marks=EXHAUSTIVE),
        (text, Candidate(zero_stage=3, data=2, tensor=2)),
        pytest.param(BLOCKS, Candidate(zero_stage=0, **PIPELINE), marks=EXHAUSTIVE),
        pytest.param(BLOCKS, Candidate(zero_stage=2, data=2, **PIPELINE), marks=EXHAUSTIVE),
        pytest.param(BLOCKS, Candidate(zero_stage=3, data=2, **PIPELINE), marks=EXHAUSTIVE),
    ],
)
def test_a_rank_alone_plans_what_it_plans_among_all(build, candidate):
    for config in (ALONE, GROUPS) if build is text and candidate.zero_stage == 3 else (ALONE,):
        strategy = strategy_of_a_step(build, candidate, config)
        for pipe in range(candidate.pipeline):
            alone = trace_rank(Job(build, traced(build), 8, kind="CPU", config=config), candidate, pipe)
            rank = alone.rank
            assert strategy.mesh.coordinate(rank).pipe == pipe
            assert named_alike(alone.plan.records[rank]) == named_alike(strategy.last_plan.records[rank])
            assert alone.plan.sent_bytes(rank) == strategy.last_plan.sent_bytes(rank) > 0
            memory, unknown = memory_of_trace(alone)
            state = state_of(traced(build), candidate, pipe)
            assert not unknown and memory.activations > 0
            assert (memory.parameters, memory.optimizer) == (state.parameters, state.optimizer)


def large():
    """64 GiB of weights."""
    model = keras.Sequential([keras.Input((2**17,)), keras.layers.Dense(2**17, use_bias=False), keras.layers.Dense(2)])
    model.compile("adam", LOSS)
    return model


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=EXHAUSTIVE), 3])
def test_weights_take_no_memory(zero_stage):
    """Neither whole nor in shards; and the devices need not be there."""
    alone = trace_rank(Job(large, trace(large), 64), Candidate(zero_stage=zero_stage, data=64))
    assert alone.state.parameter_bytes * (64 if zero_stage == 3 else 1) == pytest.approx(2**36, rel=1e-4)
    assert "GPU:0" in alone.state.device
    ops = {record.op for record in alone.plan.records[0]}
    assert ops == ({"all_gather", "reduce_scatter", "all_reduce"} if zero_stage == 3 else {"all_reduce"})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(zero_stage=2, data=8),
        Candidate(zero_stage=3, data=4, tensor=2),
    ],
)
@pytest.mark.parametrize("hosts", [1, 2])
def test_dry_runs_send_what_is_planned(candidate, hosts):
    """As GPUs, on one host and on two; none of these devices is there."""
    for config in (ALONE, GROUPS):
        found = dry_run_of(Job(text, traced(text), 16, hosts=hosts, config=config), candidate)
        assert not found.refusal and found.sent_bytes == found.planned_bytes and not found.is_lower_bound


@pytest.mark.exhaustive
def test_dry_runs_of_pipelines_send_what_is_planned():
    found = dry_run_of(Job(BLOCKS, traced(BLOCKS), 16), Candidate(zero_stage=2, data=2, **PIPELINE))
    assert not found.refusal and len(found.sent_bytes) == 2 and min(found.passed_bytes) > 0
    assert [sum(pair) for pair in zip(found.sent_bytes, found.passed_bytes, strict=True)] == list(found.planned_bytes)
    stopped = dry_run_of(Job(BLOCKS, traced(BLOCKS), 16), Candidate(zero_stage=2, data=2, **PIPELINE), limit=1)
    assert len(stopped.sent_bytes) == 1


def test_what_a_strategy_refuses():
    found = dry_run_of(Job(mlp, traced(mlp), 8), Candidate(zero_stage=0, data=2, parameter_compression="int8"))
    assert "`parameter_compression`" in found.refusal


def test_a_model_that_cannot_be_built_so_says_nothing_of_the_plan():
    def fails():
        raise TypeError("no model today")

    found = dry_run_of(Job(fails, traced(mlp), 8), Candidate(zero_stage=0, data=2))
    assert not found.refusal and "no model today" in found.failure


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_rank_alone_on_a_mesh_of_three_axes(tmp_path):
    output = tmp_path / "output.txt"
    process = forks.start(three_axes.main, environment=dict(os.environ), folder=tmp_path, output=output)
    try:
        assert process.wait(540) == 0 and "done" in output.read_text("utf-8").splitlines(), output.read_text("utf-8")
    finally:
        process.kill()
