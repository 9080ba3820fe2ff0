"""Summands stay summands through what is linear; what reads one otherwise reads the sum, which is made once."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import rank_id, run, strategy_on

from tfdist.collectives import all_reduce, current_program
from tfdist.sharding.tape_gradients import TapeGradients

GRADIENT = np.array([3.0, -4.0, 12.0], np.float32)  # of the first of two ranks; the other has twice that
SUM = 3 * GRADIENT


def on_ranks(function):
    """Returns the ranks' results of `function(state, gradient)`, of what a tape has returned for a whole parameter."""
    strategy = strategy_on(2, zero_stage=0)
    with strategy.scope():
        variable = tf.Variable(tf.zeros([3]))

    def on_rank():
        state, gradient = current_program("test").part(TapeGradients), (rank_id() + 1) * tf.constant(GRADIENT)
        state.note([gradient], [variable], lambda grads, _: [all_reduce(x, "data") for x in grads])
        return function(state, gradient)

    return run(strategy, on_rank), strategy.last_plan.counts()


@pytest.mark.parametrize(
    "make", [lambda g: g / 4, lambda g: g - tf.reduce_mean(g), lambda g: tf.reshape(g, [3, 1]) * [[1.0], [0], [2]]]
)
def test_what_is_linear_is_of_summands(make):
    def function(state, gradient):
        made = make(gradient)
        state.settle()
        assert state.is_gradient(made) and state.whole_of(made) is None
        return state.summand(made)

    found, counts = on_ranks(function)
    for rank, summand in enumerate(found):
        np.testing.assert_allclose(summand, make(tf.constant((rank + 1) * GRADIENT)), rtol=1e-6)
    assert counts == {}


def test_what_is_not_linear_reads_the_sum():
    """Also where a scaled gradient is read, and twice: one message."""

    def function(state, gradient):
        clipped, norm = tf.clip_by_value(gradient / 2, -10.0, 10.0), tf.norm(gradient)
        state.settle()
        assert state.is_of_sums(clipped) and not state.is_of_sums(gradient / 2)
        assert state.summand(clipped) is None and state.whole_of(clipped) is clipped
        return clipped, norm, state.whole_of(gradient / 2)

    found, counts = on_ranks(function)
    for clipped, norm, half in found:
        np.testing.assert_array_equal(clipped, [4.5, -6, 10])
        np.testing.assert_allclose(norm, np.linalg.norm(SUM), rtol=1e-6)
        np.testing.assert_allclose(half, SUM / 2, rtol=1e-6)
    assert counts == {"all_reduce": 1}


def test_what_is_summed_now():
    def function(state, gradient):
        state.sum_now([gradient / 3])
        state.sum_now([gradient / 5])
        return state.whole_of(-gradient)

    found, counts = on_ranks(function)
    np.testing.assert_array_equal(found, [-SUM] * 2)
    assert counts == {"all_reduce": 1}


def test_what_the_optimizer_reads_itself_is_not_the_users():
    def function(state, gradient):
        with state.own_use():
            norm = tf.norm(gradient)
        state.settle()
        return norm

    found, counts = on_ranks(function)
    np.testing.assert_allclose(found, [np.linalg.norm(GRADIENT), 2 * np.linalg.norm(GRADIENT)], rtol=1e-6)
    assert counts == {}


def test_what_is_whole_and_what_is_neither():
    def function(state, gradient):
        other = tf.stack([1.0, 2.0, 3.0])
        assert not state.is_gradient(other) and state.whole_of(other) is None and state.summand(other) is None
        state.note_whole(other)
        assert state.is_gradient(other) and state.is_of_sums(tf.exp(other))
        slot = tf.stack([4.0, 5.0, 6.0])
        state.note_slot(slot)
        assert state.whole_of(slot * 2) is not None and not state.is_gradient(slot)
        return []

    assert on_ranks(function)[1] == {}
