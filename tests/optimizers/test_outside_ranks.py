"""Whole gradients outside `strategy.run` go to the ranks as summands of themselves: the first has them, the others zeros."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import per_rank, run, strategy_on

from tfdist.collectives import current_program
from tfdist.optimizers.outside_ranks import in_scope_of, stands_outside_ranks, step_of_all_ranks

VALUE = np.arange(1, 6, dtype="float32")


@pytest.fixture
def made():
    strategy = strategy_on(2)
    with strategy.scope():
        return strategy, [keras.Variable(0 * VALUE), keras.Variable([[0.0, 0.0]]), keras.Variable(0.0)], keras.optimizers.SGD(1.0)


class Step:
    """The step of a rank: keeps what each was given."""

    def __init__(self):
        self.traced = []

    def __call__(self, optimizer, grads, variables, config):
        del config
        self.traced.append(current_program("test").rank)
        for grad, variable in zip(grads, variables, strict=True):
            variable.value._get().assign_add(grad)


def of_ranks(variable):
    return [copy.numpy() for copy in variable.value.values]


def test_summands_add_up_and_what_has_none_is_left_out(made):
    strategy, variables, optimizer = made
    step = Step()
    grads = [tf.constant(VALUE), None, per_rank(strategy, [np.float32(4), np.float32(5)])]
    with strategy.scope():
        step_of_all_ranks(optimizer, grads, variables, strategy.sharding_config, step)
        assert optimizer.built and step.traced == [0, 1]
        step_of_all_ranks(optimizer, grads, variables, strategy.sharding_config, step)
    assert step.traced == [0, 1], "the second step is the first one's function"
    np.testing.assert_array_equal(of_ranks(variables[0]), [2 * VALUE, 0 * VALUE])
    np.testing.assert_array_equal(of_ranks(variables[1]), np.zeros((2, 1, 2)))
    np.testing.assert_array_equal(of_ranks(variables[2]), [8, 10])
    with strategy.scope():
        step_of_all_ranks(optimizer, [tf.constant(VALUE)], variables[:1], strategy.sharding_config, step)
    assert step.traced == [0, 1] * 2, "of other variables it is another"


def test_as_many_gradients_as_variables(made):
    strategy, variables, optimizer = made
    with strategy.scope(), pytest.raises(ValueError, match="zip"):
        step_of_all_ranks(optimizer, [None], variables, strategy.sharding_config, Step())


def test_where_no_rank_computes(made):
    strategy, _, optimizer = made
    seen = []
    run(strategy, lambda: seen.append(stands_outside_ranks()) or [])
    with strategy.scope():
        assert stands_outside_ranks() and tf.distribute.get_strategy() is strategy
        with in_scope_of(optimizer):
            assert tf.distribute.get_strategy() is strategy
    with in_scope_of(optimizer):
        assert tf.distribute.get_strategy() is strategy
    with in_scope_of(keras.optimizers.SGD()):
        assert tf.distribute.get_strategy() is not strategy
    assert stands_outside_ranks() and seen == [False, False]
