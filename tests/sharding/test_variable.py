"""A sharded variable looks whole from outside and stores parts; odd attributes do not gather it."""

import numpy as np
import pytest
import tensorflow as tf
from training import strategy_for

from tfdist.sharding import Shard, ShardedVariable, placement

VALUE = np.arange(35, dtype="float32").reshape(5, 7)


@pytest.fixture
def strategy():
    return strategy_for(3, 3)


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return tf.Variable(VALUE, name="weight")


def parts(variable):
    return [component.numpy() for component in variable.values]


def test_stores_padded_flat_shards(variable):
    assert isinstance(variable, ShardedVariable)
    assert variable.shape == (5, 7)
    expected = np.pad(VALUE.reshape(-1), (0, 1)).reshape(3, 12)
    np.testing.assert_array_equal(parts(variable), expected)
    np.testing.assert_array_equal(variable.numpy(), VALUE)
    np.testing.assert_array_equal(np.asarray(variable), VALUE)
    np.testing.assert_array_equal(variable + 1.0, VALUE + 1)
    np.testing.assert_array_equal(variable[1:3, ::2], VALUE[1:3, ::2])


def test_assignments_outside_replicas_cut_and_scatter(variable):
    variable.assign(2 * VALUE)
    np.testing.assert_array_equal(variable.numpy(), 2 * VALUE)
    variable.assign_add(VALUE)
    variable.assign_sub(np.ones_like(VALUE))
    np.testing.assert_array_equal(variable.numpy(), 3 * VALUE - 1)
    assert all(part.shape == (12,) for part in parts(variable))


def test_assignments_inside_replicas(strategy, variable):
    @tf.function
    def step():
        def rank_step():
            variable.assign(variable * 2.0)
            return tf.reduce_sum(variable)  # reads the new value

        return strategy.run(rank_step)

    totals = strategy.experimental_local_results(step())
    assert [float(total) for total in totals] == [2 * VALUE.sum()] * 3
    np.testing.assert_array_equal(variable.numpy(), 2 * VALUE)


def test_aggregation_reduces_assignments_of_ranks(strategy):
    with strategy.scope():
        variable = tf.Variable(np.zeros(5, "float32"), aggregation=tf.VariableAggregation.MEAN)

    @tf.function
    def step():
        def rank_step():
            rank = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            variable.assign_add(tf.fill([5], rank))

        strategy.run(rank_step)

    step()
    np.testing.assert_array_equal(variable.numpy(), np.ones(5))


@pytest.mark.parametrize("shape", [(), (1,), (2,), (0, 4)])
def test_fewer_elements_than_ranks(strategy, shape):
    with strategy.scope():
        variable = tf.Variable(np.ones(shape, "float32"))
    total = tf.function(lambda: strategy.run(lambda: tf.reduce_sum(variable * 3.0)))()
    assert [float(t) for t in strategy.experimental_local_results(total)] == [3.0 * np.prod(shape)] * 3
    np.testing.assert_array_equal(variable.numpy(), np.ones(shape))


def test_unknown_attributes_gather_nothing(strategy, variable):
    @tf.function
    def probe():
        def rank_step():
            assert getattr(variable, "no_such_attribute", "absent") == "absent"
            with pytest.raises(AttributeError, match="no_such_method"):
                variable.no_such_method()
            return 0.0

        return strategy.run(rank_step)

    probe()
    assert strategy.last_plan.counts() == {}


def test_integers_and_untrained_variables_stay_replicated(strategy):
    with strategy.scope():
        assert not isinstance(tf.Variable(3), ShardedVariable)
        assert not isinstance(tf.Variable(3.0, trainable=False), ShardedVariable)


def test_values_of_each_replica_are_assigned_part_by_part(strategy, variable):
    """What `strategy.run` returns may be the shards, or the whole, of each rank: its own counts for each."""
    values = strategy.experimental_distribute_values_from_function
    variable.assign(values(lambda context: tf.constant(VALUE) + 3.0))
    np.testing.assert_array_equal(variable.numpy(), VALUE + 3)
    variable.assign_add(values(lambda context: tf.fill([12], float(context.replica_id_in_sync_group))))
    ranks = np.repeat([0, 1, 2], 12)[:35].reshape(5, 7)
    np.testing.assert_array_equal(variable.numpy(), VALUE + 3 + ranks)
    with pytest.raises(ValueError, match=r"has shape \(5, 7\); the value assigned must have it too"):
        variable.assign(values(lambda context: tf.zeros([7, 5])))


def test_updates_take_the_shards_of_their_arguments(strategy, variable):
    """`extended.update` hands a function the component; sharded arguments read as the shard of the same rank."""
    with strategy.scope():
        other = tf.Variable(10 * VALUE)
        each = strategy.experimental_distribute_values_from_function(lambda c: tf.constant(float(c.replica_id_in_sync_group)))

        def add(component, shard, rank, factor):
            assert component.shape == tf.convert_to_tensor(shard).shape == (12,)
            return component.assign(component + factor * shard + rank)

        strategy.extended.update(variable, add, args=(other, each), kwargs={"factor": 2.0})
    ranks = np.repeat([0, 1, 2], 12)[:35].reshape(5, 7)
    np.testing.assert_array_equal(variable.numpy(), 21 * VALUE + ranks)
    np.testing.assert_array_equal(other.numpy(), 10 * VALUE)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_shape_of_a_tensor_shard_inside_a_replica(zero_stage):
    strategy = strategy_for(4, zero_stage, tensor_parallel_size=2)
    with strategy.scope(), placement(tensor=Shard(1)):
        variable = tf.Variable(np.ones((3, 8), "float32"))
    shapes = []

    def on_rank():
        read = tf.convert_to_tensor(variable)
        shapes.append((tuple(variable.shape), tuple(variable.get_shape()), tuple(read.shape)))
        return tf.reduce_sum(read)

    assert variable.shape == (3, 8)
    sums = tf.function(lambda: strategy.run(on_rank))()
    assert shapes == [((3, 4),) * 3] * 4
    assert [float(x) for x in strategy.experimental_local_results(sums)] == [12] * 4
    assert variable.shape == tf.convert_to_tensor(variable).shape == (3, 8)
