"""A stub's states: what is elementwise is made again on shards, what is linear on the rank's summand, all else reads the sum."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import rank_id, run, strategy_on

from tfdist.collectives import current_program
from tfdist.sharding.gradient_state import GradientState
from tfdist.sharding.gradient_stubs import GradientStubs

FULL = np.array([1.0, -2.0, 3.0, -4.0, 5.0], np.float32)  # of rank 0; 2 elements a rank of 3, one of padding
SUM = 6 * FULL
SHARDS = np.pad(SUM, (0, 1)).reshape(3, 2)


def on_ranks(function):
    """Returns the ranks' results of `function(stubs, stub)`, of a rank whose summand is its number times that of the first."""
    strategy = strategy_on(3, zero_stage=3)
    with strategy.scope():
        variable = tf.Variable(tf.zeros([5]))

    def on_rank():
        stubs = current_program("test").part(GradientStubs)
        return function(stubs, stubs.make(variable, (rank_id() + 1) * tf.constant(FULL)))

    return run(strategy, on_rank), strategy


def reduced(stubs, stub):
    stubs.note_reduced(stub, tf.constant(SHARDS[rank_id()]))


def test_waiting_until_it_is_reduced():
    def function(stubs, stub):
        assert stubs.waiting == [stub] and stub.tensor.shape == [5] and not stub.state.is_reduced
        reduced(stubs, stub)
        assert stubs.waiting == [] and stub.state is GradientState.SHARD
        return stubs.shard_of(stub.tensor)

    found, strategy = on_ranks(function)
    np.testing.assert_array_equal(found, SHARDS)
    assert strategy.last_plan.counts() == {}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda g: g / 4, lambda g: g / 4),
        (lambda g: tf.exp(g * 0.1) + 1, lambda g: np.exp(g * 0.1) + 1),  # of zeros it makes others
        (lambda g: g + tf.fill([5], 2.0), lambda g: g + 2),
        (lambda g: tf.where(g > 0, g, tf.zeros_like(g)), lambda g: np.maximum(g, 0)),
    ],
)
def test_elementwise_operations_are_made_again_on_shards(make, expected):
    def function(stubs, stub):
        reduced(stubs, stub)
        return stubs.shard_of(make(stub.tensor))

    found, strategy = on_ranks(function)
    np.testing.assert_allclose(found, np.pad(expected(SUM), (0, 1)).reshape(3, 2), rtol=1e-6)
    assert strategy.last_plan.counts() == {}


def test_what_is_not_elementwise_has_no_shard():
    def function(stubs, stub):
        reduced(stubs, stub)
        g = stub.tensor
        others = [tf.reverse(g, [0]), g * tf.range(5.0), tf.ones([5])]
        assert [stubs.shard_of(x) for x in others] == [None] * 3
        return []

    on_ranks(function)


def test_summands_of_what_is_linear():
    def function(stubs, stub):
        g = stub.tensor
        centred, clipped, other = (g - tf.reduce_mean(g)) * tf.range(5.0), tf.clip_by_value(g, -1.0, 1.0), tf.ones([5])
        assert stubs.summand(clipped) is None and stubs.summand(other) is None
        assert [stubs.needs_sums(x) for x in (centred, clipped, other)] == [False, True, False]
        assert [stubs.below(x) for x in (centred, clipped, other)] == [[stub], [stub], []]
        summand = stubs.summand(centred)
        reduced(stubs, stub)
        return summand

    found, _ = on_ranks(function)
    for rank, summand in enumerate(found):
        np.testing.assert_allclose(summand, (rank + 1) * (FULL - FULL.mean()) * np.arange(5), rtol=1e-6)


@pytest.mark.parametrize("is_read", [False, True])
def test_what_is_read_whole_is_gathered(is_read):
    """A function of elements that nobody reads, or that an optimizer takes, gathers nothing."""
    made = []

    def function(stubs, stub):
        scaled = stub.tensor / 2
        norm = tf.norm(scaled) if is_read else tf.zeros([])
        reduced(stubs, stub)
        made.append(stub)
        return norm, stubs.shard_of(scaled)

    found, strategy = on_ranks(function)
    assert [stub.state for stub in made] == 3 * [GradientState.WHOLE if is_read else GradientState.SHARD]
    np.testing.assert_allclose([norm for norm, _ in found], 3 * [np.linalg.norm(SUM) / 2 if is_read else 0], rtol=1e-6)
    np.testing.assert_array_equal([shard for _, shard in found], SHARDS / 2)
    assert strategy.last_plan.counts() == ({"all_gather": 1} if is_read else {})


@pytest.mark.parametrize("gets_sum", [False, True])
def test_a_variable_gets_the_summand_unless_it_is_noted(gets_sum):
    """As totals in a custom training loop, and as parameters."""
    strategy = strategy_on(2, zero_stage=3)
    with strategy.scope():
        weight = tf.Variable(tf.zeros([5]))
        total = tf.Variable(
            tf.zeros([5]), aggregation=tf.VariableAggregation.SUM, synchronization=tf.VariableSynchronization.ON_READ
        )

    def on_rank():
        stubs = current_program("test").part(GradientStubs)
        stub = stubs.make(weight, (rank_id() + 1) * tf.constant(FULL))
        handle = total.values[rank_id()].handle
        if gets_sum:
            stubs.note_gets_sum(handle)
        scaled = stub.tensor * 2
        tf.raw_ops.AssignAddVariableOp(resource=handle, value=scaled)
        [writer] = scaled.consumers()
        assert stubs.gets_summand(writer, scaled) is not gets_sum
        stubs.note_reduced(stub, tf.zeros([3]))
        return []

    run(strategy, on_rank)
