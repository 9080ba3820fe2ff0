"""The report of memory for a pipeline: each rank holds its stage only."""

import keras
import pytest

import tfdist
from tests.devices import names
from tests.profiling.test_memory_report import COUNTERS


@pytest.mark.parametrize("zero_stage", range(3))
def test_a_pipeline_rank_holds_its_stage_only(zero_stage):
    strategy = tfdist.ShardedStrategy(names(4), zero_stage=zero_stage, pipeline_parallel_size=2)
    with strategy.scope():
        layers = [keras.Input((5,)), keras.layers.Dense(7), keras.layers.Dense(3)]
        model = tfdist.PipelineModel(layers, num_microbatches=2)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.optimizer.build(model.trainable_variables)
    report = tfdist.memory_report(model)
    assert "pipeline_parallel_size=2, 4 devices" in str(report)
    stages = [[5 * 7, 7], [7 * 3, 3]]
    for index, memory in enumerate(report.devices):
        whole = 4 * sum(stages[index % 2])
        part = 4 * sum(-(-size // 2) for size in stages[index % 2])
        assert memory.parameter_bytes == whole
        assert memory.gradient_bytes == (part if zero_stage == 2 else whole)
        assert memory.optimizer_bytes == (part if zero_stage else whole) + COUNTERS
    assert report.mirrored.gradient_bytes == 4 * sum(map(sum, stages))
