"""How far what an optimizer is given has come: a rank's summand, its shard of a sum, or the whole sum."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import rank_id, run, strategy_on

from tfdist.collectives import current_program
from tfdist.optimizers import given
from tfdist.optimizers.target import Target
from tfdist.sharding.gradient_state import GradientState
from tfdist.sharding.gradient_stubs import GradientStubs
from tfdist.sharding.known_sums import KnownSums
from tfdist.sharding.tape_gradients import TapeGradients

VALUE = np.arange(1, 6, dtype="float32")  # 2 elements a rank of 3, one of padding


def on_ranks(function, zero_stage, value=VALUE):
    """Returns the ranks' results of `function(target)` and the counts of what was sent."""
    strategy = strategy_on(3, zero_stage=zero_stage)
    with strategy.scope():
        variable = tf.Variable(value)
    results = run(strategy, lambda: function(Target.of(variable, strategy.sharding_config, current_program("test"))))
    return results, strategy.last_plan.counts()


def test_stages_at_which_partial_sums_are_accumulated():
    configs = [strategy_on(2, zero_stage=stage).sharding_config for stage in range(4)]
    sgd = keras.optimizers.SGD(gradient_accumulation_steps=3)
    assert [given.accumulates_partial_sums(sgd, config) for config in configs] == [True, True, False, False]
    assert not any(given.accumulates_partial_sums(keras.optimizers.SGD(), config) for config in configs)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_summands_of_a_sum_add_up_to_it(zero_stage):
    def function(target):
        shard = tf.constant(np.pad(VALUE, (0, 1)).reshape(3, 2)[rank_id()])
        return given.summand_of_sum(tf.constant(VALUE) if zero_stage == 0 else shard, target)

    found, counts = on_ranks(function, zero_stage)
    np.testing.assert_array_equal(np.sum(found, 0), VALUE)
    assert counts == {}


def test_a_sum_that_all_ranks_have_counts_once():
    """With weights, which add up to 1, each rank's counts its weight later."""

    def function(target):
        whole = tf.constant(VALUE) * 2
        target.program.part(TapeGradients).note_whole(whole)
        return given.summand(whole, target, None), given.summand(whole, target, tf.constant(0.5))

    for rank, (first, weighted) in enumerate(on_ranks(function, 0)[0]):
        np.testing.assert_array_equal(first, 2 * VALUE if rank == 0 else 0 * VALUE)
        np.testing.assert_array_equal(weighted, 2 * VALUE)


@pytest.mark.parametrize(("zero_stage", "state"), [(0, "WHOLE"), (1, "SHARD"), (3, "SHARD")])
def test_what_is_kept_of_a_known_sum(zero_stage, state):
    """And a gradient that nothing is known of is a summand, at each stage."""

    def function(target):
        config, program = tf.distribute.get_strategy().sharding_config, target.program
        known, unknown, part = tf.stack([1.0] * 5), tf.stack([2.0] * 5), tf.stack([3.0] * (5 if zero_stage == 0 else 2))
        program.part(KnownSums).note(known, part)
        found = given.take(None, [known, unknown], [target.variable] * 2, config, program)
        assert [x.name for x in found.states] == [state, "SUMMAND"] and found.are_summed == [False, False]
        assert found.tensors[0] is part and found.from_caller[0] is known and found.weight is None
        return []

    assert on_ranks(function, zero_stage)[1] == {}


def test_a_stub_gives_its_shard():
    def function(target):
        program = target.program
        stub = program.part(GradientStubs).make(target.variable, tf.ones([5]))
        program.part(GradientStubs).note_reduced(stub, tf.constant([4.0, 8.0]))
        shard, state = given.own_part(stub.tensor / 4, target)
        assert state is GradientState.SHARD
        return shard

    found, counts = on_ranks(function, 3)
    np.testing.assert_array_equal(found, [[1, 2], [1, 2], [1, 0]])
    assert counts == {}


def test_shapes_of_gradients_of_a_sharded_parameter():
    """A shard of a sum, or the parameter's own shape; where both are (1,) it is a shard only if a tape was asked for it."""

    def function(target):
        assert given.comes_reduced(tf.zeros([2]), target) and not given.comes_reduced(tf.zeros([5]), target)
        with pytest.raises(ValueError, match="must have its shape"):
            given.comes_reduced(tf.zeros([3]), target)
        return []

    on_ranks(function, 3)
    on_ranks(lambda target: [] if not given.comes_reduced(tf.zeros([1]), target) else 1 / 0, 3, VALUE[:1])


def test_a_changed_gradient_is_made_the_same():
    """Each shard as the data rank of that number has it."""

    def function(target):
        config = tf.distribute.get_strategy().sharding_config
        return given._agreed([rank_id() + 1 + 10 * tf.range(5.0)], [target], config, target.program)

    found, counts = on_ranks(function, 0)
    np.testing.assert_array_equal([x for [x] in found], [[1, 11, 22, 32, 43]] * 3)
    assert counts == {"all_gather": 1}


@pytest.mark.parametrize(
    ("is_sharded", "shape", "expected"), [(False, [None, 3], [5, 3]), (True, [None, 3], [5, 3]), (True, [None], [None])]
)
def test_static_shapes(is_sharded, shape, expected):
    """Of what may be a shard nothing is known."""
    target = types.SimpleNamespace(layout=types.SimpleNamespace(is_data_sharded=is_sharded, local_shape=(5, 3)))
    with tf.Graph().as_default():
        assert given.dense(tf.compat.v1.placeholder(tf.float32, shape), target).shape.as_list() == expected
