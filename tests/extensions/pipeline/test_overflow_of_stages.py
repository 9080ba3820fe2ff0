"""Loss scaling when one stage alone overflows: all ranks skip the step, as one device does."""

import keras
import pytest

import tfdist
from tests.optimizers.overflowing import Overflowing, assert_all_skip_the_step, trained


def on_stages(strategy):
    """The gradient is infinite below the last stage's layer: only the first stage's weights overflow."""
    with strategy.scope():
        layers = [keras.Input((5,)), keras.layers.Dense(4), Overflowing(), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        if isinstance(strategy, tfdist.ShardedStrategy):
            model = tfdist.PipelineModel(model, num_microbatches=2, stages=[2])
    return trained(model, strategy)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_all_skip_the_step(zero_stage):
    assert_all_skip_the_step(on_stages, zero_stage, pipeline_parallel_size=2)
