"""What is computed of gradients, and the numbers that these meet: of the whole batch, and not of the rank's rows."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import run, strategy_on

from tfdist.collectives import current_program
from tfdist.sharding.gradient_numbers import GradientNumbers

X = [np.array([1.0, 2.0, 4.0], np.float32), np.array([3.0], np.float32)]  # rows: 3 and 1
GRADIENT = tf.constant([5.0, 6.0, 7.0]).numpy()


def on_ranks(function, values=X):
    """Returns the ranks' results of `function(numbers, x, gradient)`, of what a tape would have returned."""
    strategy = strategy_on(len(values))

    def on_rank(x):
        numbers, gradient = current_program("test").part(GradientNumbers), tf.stack([5.0, 6.0, 7.0])
        numbers.note(gradient)
        return function(numbers, x, gradient)

    return run(strategy, on_rank, values), strategy


@pytest.mark.parametrize("meets", [False, True])
def test_a_loss_is_that_of_the_batch_where_a_gradient_meets_it(meets):
    """The sum of the ranks' shares; a rank's own where only another number meets it."""

    def function(numbers, x, gradient):
        loss, other = tf.reduce_sum(x), tf.stack([5.0, 6.0, 7.0])
        product = (gradient if meets else other) * loss
        numbers.settle()
        assert numbers.is_of_gradients(product) is meets and not numbers.is_of_gradients(other)
        return [product]

    found, strategy = on_ranks(function)
    own = [GRADIENT * 7, GRADIENT * 3]
    np.testing.assert_array_equal([x for [x] in found], [GRADIENT * 10] * 2 if meets else own)
    assert bool(strategy.last_plan.counts()) is meets


def test_numbers_that_all_ranks_share_send_nothing():
    def function(numbers, x, gradient):
        del x
        return [gradient * tf.constant(0.5) + tf.zeros([3])]

    found, strategy = on_ranks(function)
    np.testing.assert_array_equal([x for [x] in found], [GRADIENT / 2] * 2)
    assert strategy.last_plan.counts() == {}


@pytest.mark.parametrize("way", ["going_back", "own_use"])
def test_what_a_tape_or_the_optimizer_computes_is_left_alone(way):
    def function(numbers, x, gradient):
        loss = tf.reduce_sum(x)
        with getattr(numbers, way)():
            product = gradient * loss
        numbers.settle()
        return [product]

    found, strategy = on_ranks(function)
    np.testing.assert_array_equal([x for [x] in found], [GRADIENT * 7, GRADIENT * 3])
    assert strategy.last_plan.counts() == {}


def test_a_branch_knows_what_it_has_captured():
    def function(numbers, x, gradient):
        del numbers
        scaled, found = gradient * 2.0, []

        def late():
            inside = current_program("test").here().part(GradientNumbers)
            doubled, other = scaled * 2.0, x[:1] * 3.0
            found.extend([inside.is_of_gradients(doubled), inside.is_of_gradients(other)])
            return doubled

        tf.cond(tf.constant(True), late, lambda: scaled)
        assert found == [True, False]
        return []

    on_ranks(function)
