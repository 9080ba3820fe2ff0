"""A scale that was given before its optimizer is built; and on what the ranks agree of gradients that are finite."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import rank_id, run, strategy_on

from tfdist.collectives import current_program
from tfdist.optimizers.loss_scaling import EarlyScales, _agreed


def scaled_optimizer(initial):
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=initial)


def test_what_was_scaled_reads_the_scale_of_its_optimizer():
    """The constant before it is built, as also where it never is."""
    strategy = strategy_on(2)
    with strategy.scope():
        weight, first, second = keras.Variable([1.0, 2.0, 3.0]), scaled_optimizer(4.0), scaled_optimizer(32.0)
        first.build([weight])
        first.dynamic_scale.assign(8.0)

    def on_rank():
        scales, loss = current_program("test").part(EarlyScales), tf.constant(3.0)
        found = [scales.scaled(first, loss), scales.scaled(second, loss), scales.scaled(first, loss * 2)]
        scales.use_scale_of(first)
        return found

    assert run(strategy, on_rank) == [[24.0, 96.0, 48.0]] * 2


@pytest.mark.parametrize(
    ("zero_stage", "is_partial", "worst", "expected"),
    [
        (2, False, 60000.0, True),
        (2, False, np.inf, False),  # of one rank's shard: the ranks agree
        (2, False, np.nan, False),
        (0, True, 30000.0, True),
        (0, True, -60000.0, False),  # finite, and the sum of two such is not
        (0, True, np.nan, False),
    ],
)
def test_all_ranks_agree(zero_stage, is_partial, worst, expected):
    strategy = strategy_on(2, zero_stage=zero_stage)

    def on_rank():
        grads = [tf.ones([3]), tf.constant([1.0, worst if rank_id() == 1 else 2.0], tf.float16)]
        return _agreed(grads, strategy.sharding_config, current_program("test"), is_partial)

    assert run(strategy, on_rank) == [expected] * 2
    assert strategy.last_plan.counts() == {"all_reduce": 1}


def test_reduced_gradients_that_all_have_need_no_message():
    strategy = strategy_on(2, zero_stage=0)
    found = run(strategy, lambda: _agreed([tf.ones([3])], strategy.sharding_config, current_program("test"), False))
    assert found == [True] * 2 and strategy.last_plan.counts() == {}
