"""Candidates and their memory as data: what is refused, what they are called, and the Python that runs them."""

import ast
import dataclasses

import pytest

from tfdist.sharding import ShardingConfig
from tfdist.tools.planning import Candidate, DeviceMemory

PIPELINE = {"pipeline": 4, "schedule": "1f1b", "microbatches": 8}


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"data": 0}, "`data`"),
        ({"zero_stage": 4}, "zero_stage"),
        ({"schedule": "1f1b"}, "`schedule`"),
        ({"pipeline": 2}, "`schedule`"),
        ({"microbatches": 2}, "`microbatches`"),
        ({"data": 4, "sharding_group_size": 3}, "`sharding_group_size`"),
        ({"pipeline": 2, "schedule": "interleaved"}, "`stages_per_rank`"),
        ({**PIPELINE, "stages_per_rank": 2}, "`stages_per_rank`"),
    ],
)
def test_wrong_sizes_are_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        Candidate(**wrong)


def test_names_and_numbers():
    assert Candidate(zero_stage=0).name() == "zero 0" and Candidate().devices == 1
    sharded = Candidate(zero_stage=3, data=8, tensor=8, recompute=True)
    assert sharded.name() == "zero 3, tensor 8, recompute" and sharded.devices == 64 and sharded.shards == 8
    grouped = dataclasses.replace(sharded, sharding_group_size=2, parameter_compression="int8")
    assert grouped.name() == "zero 3, groups of 2, tensor 8, recompute, int8 parameters" and grouped.shards == 2
    staged = Candidate(zero_stage=1, data=2, gradient_compression="int8", **PIPELINE)
    assert staged.name() == "zero 1, pipeline 4 1f1b x 8, int8 gradients" and staged.devices == 8


def test_python_names_settings_that_exist_and_parses():
    candidates = [
        Candidate(zero_stage=3, data=8, tensor=8, recompute=True),
        Candidate(zero_stage=1, data=2, gradient_compression="int8", recompute=True, **PIPELINE),
    ]
    for candidate, hosts in zip(candidates, (1, 8), strict=True):
        program = ast.parse(candidate.python(hosts=hosts, blocks="layer"))
        call = program.body[0].value
        ShardingConfig(**{keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords})
    assert candidates[0].python(blocks="layer").splitlines() == [
        "strategy = tfdist.ShardedStrategy(zero_stage=3, tensor_parallel_size=8)",
        "with strategy.scope():",
        "    model = build()",
        "    tfdist.parallelize(model, tfdist.suggest_plan(model, 8))",
        '    tfdist.recompute(model, "layer")',
    ]
    staged = candidates[1].python(hosts=8)
    assert staged.startswith("strategy = tfdist.MultiWorkerShardedStrategy(")
    assert 'tfdist.PipelineModel(build(), num_microbatches=8, schedule="1f1b", recompute=True)' in staged
    of_three_axes = Candidate(tensor=2, pipeline=2, schedule="interleaved", microbatches=4, stages_per_rank=2)
    assert of_three_axes.name() == "zero 2, tensor 2, pipeline 2 interleaved x 4 of 4 stages" and of_three_axes.stages == 4
    assert of_three_axes.python().splitlines()[2:] == [
        "    model = build()",
        "    tfdist.parallelize(model, tfdist.suggest_plan(model, 2))",
        '    model = tfdist.PipelineModel(model, num_microbatches=4, schedule="interleaved", stages_per_rank=2)',
    ]


def test_memory_is_added_and_its_largest_part_named():
    memory = DeviceMemory(parameters=4, gradients=4, optimizer=8, activations=9, buffers=1)
    assert memory.together == 26 and memory.largest() == "activations"
