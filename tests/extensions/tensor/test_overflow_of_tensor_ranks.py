"""Loss scaling when one tensor rank alone overflows: all ranks skip the step, as one device does."""

import keras
import pytest
from training import one_device

import tfdist
from tests.optimizers.overflowing import Overflowing, assert_all_skip_the_step, trained


def on_tensor_ranks(strategy):
    """The last of four columns is the second rank's, and no weight is below them: the first rank's gradients are finite."""
    first = keras.layers.Dense(4) if strategy is one_device() else None
    with strategy.scope():
        first = first or tfdist.layers.ColumnParallelDense(4, gather_output=True)
        model = keras.Sequential([keras.Input((5,)), first, Overflowing(), keras.layers.Dense(2)])
    return trained(model, strategy)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_all_skip_the_step(zero_stage):
    assert_all_skip_the_step(on_tensor_ranks, zero_stage, tensor_parallel_size=2)
