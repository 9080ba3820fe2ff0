"""Recomputation in pipelines: the same masks of dropout and statistics, one device's numbers, and nothing kept within blocks."""

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from training import one_device, strategy_for

import tfdist
from tests import workers
from tests.devices import is_on
from tests.parity.comparison import assert_same_tree
from tests.programs.comparing import run
from tests.programs.memory.test_recomputation import (
    X,
    Y,
    ancestors,
    is_backward,
    kept_within_blocks,
)
from tests.programs.memory.test_recomputation_of_models import dense_blocks, fit, small_blocks

pytestmark = pytest.mark.as_traced


def pipeline(strategy, is_recomputed, dropout=0.0, statistics=False, depth=4, **settings):
    """A model of `depth` blocks in a pipeline."""

    def wrapped(model):
        return tfdist.PipelineModel(model, num_microbatches=2, **settings)

    return small_blocks(strategy, is_recomputed, dropout, statistics, depth, wrapped)


def fitted(strategy, is_recomputed, **settings):
    return fit(pipeline(strategy, is_recomputed, **settings))


def in_a_pipeline(strategy):
    return fitted(strategy, True, dropout=0.3, statistics=True, schedule="zero_bubble")


# (schedule, stages per rank, statistics, ZeRO stage, settings)
PIPELINES = [
    ("zero_bubble", 1, True, 0, {"depth": 2}),
    exhaustive("zero_bubble", 1, True, 0, {}),
    exhaustive("zero_bubble", 1, False, 3, {}),
    exhaustive("1f1b", 1, False, 3, {"reshard_after_microbatch": True}),
    exhaustive("1f1b", 1, True, 3, {}),
    exhaustive("1f1b", 1, False, 0, {"recompute": True}),
    exhaustive("gpipe", 1, True, 0, {"recompute": True}),
    exhaustive("gpipe", 1, False, 1, {}),
    exhaustive("interleaved", 2, True, 3, {"reshard_after_microbatch": True}),
    exhaustive("interleaved", 2, False, 0, {}),
]


def pipelined(zero_stage):
    return strategy_for(2 if zero_stage == 0 else 4, zero_stage, pipeline_parallel_size=2)


@pytest.mark.parametrize(("schedule", "stages_per_rank", "statistics", "zero_stage", "settings"), PIPELINES)
def test_pipelines(float64, schedule, stages_per_rank, statistics, zero_stage, settings):
    """Dropout draws the same masks, statistics move on once for a microbatch."""
    settings = {"schedule": schedule, "stages_per_rank": stages_per_rank, "statistics": statistics, "dropout": 0.3, **settings}
    kept, again = (run(lambda s, r=r: fitted(s, r, **settings), pipelined(zero_stage)) for r in (False, True))
    assert_same_tree(again, kept)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_pipeline_is_one_device(float64, zero_stage):
    found = run(lambda s: fitted(s, True, schedule="1f1b"), pipelined(zero_stage))
    assert_same_tree(found, run(dense_blocks, one_device()))


@pytest.mark.parametrize(("schedule", "zero_stage"), [("1f1b", 0), exhaustive("zero_bubble", 0), exhaustive("1f1b", 3)])
def test_what_a_pipeline_keeps(schedule, zero_stage):
    """Of a block nothing but what it takes and returns, and of one block at a time all is there."""

    def graph_of(is_recomputed, statistics=True):
        strategy = pipelined(zero_stage)
        model = pipeline(strategy, is_recomputed, schedule=schedule, statistics=statistics)
        model.optimizer.build(model.trainable_variables)
        train = lambda x, y: model.train_step((x, y))  # noqa: E731
        step = tf.function(lambda x, y: strategy.run(train, args=(x, y)))
        return step.get_concrete_function(tf.constant(X[:8, 0]), tf.constant(Y[:8])).graph

    assert len(kept_within_blocks(graph_of(is_recomputed=False))) > 40
    graph = graph_of(is_recomputed=True, statistics=False)
    assert kept_within_blocks(graph) == []
    again = [op for op in graph.get_operations() if op.type in ("Erf", "Erfc") and is_backward(op) and is_on(op, 0)]
    assert len(again) == 4  # two blocks, two microbatches
    for behind, operation in zip(again, again[1:], strict=False):
        assert {reader.name for reader in behind.outputs[0].consumers()} <= ancestors([operation])


def run_on_workers():
    keras.config.set_floatx("float64")
    return run(in_a_pipeline, tfdist.MultiWorkerShardedStrategy(zero_stage=0, pipeline_parallel_size=2))


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("float64")
def test_over_workers(tmp_path):
    """Blocks that are computed again in a pipeline of two processes, beside that of one."""
    target = "tests.extensions.pipeline.programs.test_recomputation_in_pipelines:run_on_workers"
    with workers.job(tmp_path, 2, target) as job:
        expected = run(in_a_pipeline, strategy_for(2, 0, pipeline_parallel_size=2))
        for found in job.results(150):
            assert_same_tree(found, expected)
