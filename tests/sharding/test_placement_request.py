"""What is asked for of a variable, and the layout that follows."""

import dataclasses
import threading

import keras
import pytest
import tensorflow as tf

import tfdist
from tfdist.mesh import DeviceMesh
from tfdist.sharding import (
    Layout,
    MeshConfig,
    Partial,
    PlacementRequest,
    Replicate,
    Shard,
    current_placement,
    placement,
    request_placement,
)
from tfdist.sharding.placements import Own

MESH = DeviceMesh(tuple(f"CPU:{index}" for index in range(8)), pipeline_parallel_size=2, tensor_parallel_size=2)
SPEC = tf.TensorSpec([4, 6], tf.float32)


def config(zero_stage, mesh=MESH):
    return MeshConfig(mesh=mesh, zero_stage=zero_stage)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_without_a_request_trainable_variables_are_parameters(zero_stage):
    stage = config(zero_stage)
    request = PlacementRequest()
    parameter = request.layout(SPEC, True, stage)
    assert parameter == Layout((4, 6), MESH, data=Shard() if zero_stage == 3 else Replicate())
    assert request.may_shard(True, stage) == parameter.is_sharded
    replicated = Layout((4, 6), MESH)
    assert request.layout(SPEC, False, stage) == replicated and not request.may_shard(False, stage)
    assert request.layout(tf.TensorSpec([4, 6], tf.int32), True, stage) == replicated
    scalar = PlacementRequest(is_replicated=True)
    assert scalar.layout(SPEC, True, stage) == replicated and not scalar.may_shard(True, stage)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_tensor_axis_and_pipeline_ranks_combine_with_the_stage(zero_stage):
    stage = config(zero_stage)
    request = PlacementRequest(tensor=Shard(1), pipe_owners=(1,))
    data = Shard() if zero_stage == 3 else Replicate()
    assert request.layout(SPEC, True, stage) == Layout((4, 6), MESH, tensor=Shard(1), data=data, pipe_owners=(1,))
    assert request.layout(SPEC, False, stage) == Layout((4, 6), MESH, tensor=Shard(1), pipe_owners=(1,))
    assert request.may_shard(False, stage)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_slot_is_placed_like_its_parameter(zero_stage):
    stage = config(zero_stage)
    parameter = PlacementRequest(tensor=Shard(0), pipe_owners=(0,)).layout(SPEC, True, stage)
    slot = PlacementRequest(slot_of=parameter)
    assert slot.layout(SPEC, False, stage) == dataclasses.replace(parameter, data=Shard() if zero_stage else Replicate())
    # A factor, or a counter, is on every rank that has the parameter.
    assert slot.layout(tf.TensorSpec([4], tf.float32), False, stage) == Layout((4,), MESH, pipe_owners=(0,))
    owned = dataclasses.replace(slot, data_owner=1)
    assert owned.layout(SPEC, False, stage) == Layout((4, 6), MESH, data=Own(1), pipe_owners=(0,))
    assert not dataclasses.replace(slot, is_partial=True).may_shard(False, stage)


def test_scopes_nest_and_end():
    with placement(pipe_owners=(1,)):
        with placement(tensor=Shard(0)):
            assert current_placement() == PlacementRequest(tensor=Shard(0), pipe_owners=(1,))
        with pytest.raises(KeyError), placement(data_owner=3):
            raise KeyError
        assert current_placement() == PlacementRequest(pipe_owners=(1,))
        seen = []
        thread = threading.Thread(target=lambda: seen.append(current_placement()))
        thread.start()
        thread.join()
    assert seen == [PlacementRequest()]  # a scope is of the thread that opens it
    assert current_placement() == PlacementRequest()


def test_a_strategy_makes_what_is_asked_for(cpus):
    strategy = tfdist.ShardedStrategy(cpus[:4], zero_stage=3, tensor_parallel_size=2)
    with strategy.scope():
        with placement(tensor=Shard(1)):
            sharded = tf.Variable(tf.ones((4, 6)))
        with placement(is_replicated=True):
            scalar = tf.Variable(1.0)
        with placement(is_partial=True):
            total = tf.Variable(tf.zeros(3), trainable=False)
    assert sharded.layout == Layout((4, 6), strategy.mesh, tensor=Shard(1), data=Shard())
    assert not scalar.layout.is_sharded and total.layout.data == Partial()


def test_what_is_kept_holds_when_a_value_is_made_later_or_again(cpus):
    strategy = tfdist.ShardedStrategy(cpus[:2], zero_stage=0, tensor_parallel_size=2)
    with strategy.scope():
        now = keras.Variable("ones", (4, 6))
        with keras.StatelessScope():
            later = keras.Variable("ones", (4, 6))
            request_placement(later, tensor=Shard(0))
        assert later.value.layout == Layout((4, 6), strategy.mesh, tensor=Shard(0))
        now.assign(7 * now)
        request_placement(now, tensor=Shard(1))
    assert now.value.layout == Layout((4, 6), strategy.mesh, tensor=Shard(1))
    assert now.numpy().sum() == 7 * 24
