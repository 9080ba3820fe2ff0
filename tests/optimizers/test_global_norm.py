"""The norm of the sum over the ranks; what is clipped by it is known as reduced, and None stays in its place."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import rank_id, run, strategy_on

import tfdist
from tfdist.collectives import current_program
from tfdist.sharding.known_sums import KnownSums
from tfdist.sharding.tape_gradients import TapeGradients

GRADIENTS = [np.array([3.0, 4, 0, 0, 12], np.float32), np.array([[-84.0]], np.float32)]  # the norm is 85: of rank 0
NORM = 3 * 85.0


@pytest.mark.parametrize(("zero_stage", "whole"), [(0, True), (1, False), (2, False)])
def test_of_gradients_of_two_ranks(zero_stage, whole):
    strategy = strategy_on(2, zero_stage=zero_stage)
    with strategy.scope():
        variables = [tf.Variable(tf.zeros([5])), tf.Variable(tf.zeros([2])), tf.Variable(tf.zeros([1, 1]))]

    def on_rank():
        grads = [(rank_id() + 1) * tf.constant(value) for value in GRADIENTS]
        grads.insert(1, None)
        clipped, norm = tfdist.clip_by_global_norm(grads, variables, NORM / 10)
        known, tapes = current_program("test").part(KnownSums), current_program("test").part(TapeGradients)
        assert clipped[1] is None and all(known.is_returned(x) for x in clipped if x is not None)
        assert [tapes.whole_of(x) is x for x in clipped if x is not None] == [whole, whole]
        return norm, tfdist.global_norm(grads, variables), clipped[0]

    for rank, (norm, again, clipped) in enumerate(run(strategy, on_rank)):
        np.testing.assert_allclose([norm, again], [NORM, NORM], rtol=1e-6)
        expected = 0.3 * GRADIENTS[0]
        mine = expected if whole else np.pad(expected, (0, 1))[3 * rank : 3 * rank + 3]
        np.testing.assert_allclose(clipped, mine, rtol=1e-6)


def test_without_a_strategy():
    grads = [tf.constant(GRADIENTS[0]), None, tf.constant(GRADIENTS[1])]
    variables = [tf.Variable(0.0)] * 3
    assert float(tfdist.global_norm(grads, variables)) == 85
    clipped, norm = tfdist.clip_by_global_norm(grads, variables, 8.5)
    assert float(norm) == 85 and clipped[1] is None
    np.testing.assert_allclose(clipped[2], [[-8.4]], rtol=1e-6)
    for function in (tfdist.global_norm, lambda *both: tfdist.clip_by_global_norm(*both, 1.0)):
        with pytest.raises(ValueError, match="zip"):
            function(grads, variables[:2])
