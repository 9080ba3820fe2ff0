"""Gradients that are taken, and steps that are made, outside `strategy.run` on a mesh with tensor ranks."""

import pytest
import tensorflow as tf
from grids import exhaustive

import tfdist
from tests.programs.comparing import assert_as_on_one_device
from tests.programs.gradients.test_gradients_outside_run import _gradients, _mlp, _numbers
from tests.programs.loops.test_steps_outside_run import reptile


def of_sharded_layers(strategy):
    """Weights that are sharded over the tensor axis, at stage 3 over data, too."""
    with strategy.scope():
        model = _mlp(strategy)
        if hasattr(strategy, "mesh"):
            tfdist.parallelize(model, {"dense": "row"})
    return {"eager": _numbers(_gradients(model)), "traced": _numbers(tf.function(lambda: _gradients(model))())}


@pytest.mark.parametrize("zero_stage", [*map(exhaustive, (0, 1, 2)), 3])
def test_layers_that_are_sharded_over_the_tensor_axis(zero_stage):
    assert_as_on_one_device(of_sharded_layers, zero_stage, devices=4, tensor_parallel_size=2)


@pytest.mark.as_traced
@pytest.mark.parametrize("zero_stage", [exhaustive(0), exhaustive(1), 3])
def test_a_mesh_with_tensor_ranks(zero_stage):
    assert_as_on_one_device(reptile, zero_stage, 4, tensor_parallel_size=2)
