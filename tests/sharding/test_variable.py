"""A sharded variable looks whole from outside and stores parts; odd attributes do not gather it."""

import numpy as np
import pytest
import tensorflow as tf
from training import strategy_for

from tfdist.sharding import ShardedVariable

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
