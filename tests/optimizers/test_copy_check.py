"""Copies that have drifted apart are named, in the steps in which they are compared; equal ones pass."""

import types

import pytest
import tensorflow as tf
from ranks import rank_id, strategy_on, trace

from tfdist.collectives import current_program
from tfdist.optimizers.copy_check import check_drift


@pytest.mark.parametrize("every", [1, 3])
def test_drift_is_found_when_it_is_due(every):
    strategy = strategy_on(2, zero_stage=0, tensor_parallel_size=2, check_drift_every=every)
    with strategy.scope():
        weights = [tf.Variable(tf.ones([5, 3]), name="same"), tf.Variable(tf.ones([3]), name="drifted")]
        iterations = tf.Variable(0, trainable=False, dtype=tf.int64)

    def on_rank(drift):
        weights[1].values[rank_id()].assign_add(drift * rank_id() * tf.constant([0.0, 0.0, 1e-7]))
        optimizer = types.SimpleNamespace(iterations=iterations)
        check_drift(optimizer, weights, strategy.sharding_config, current_program("test"))

    step = trace(strategy, on_rank)
    for number in range(2 * every):
        iterations.assign(number)
        step(tf.constant(0.0))
    for number in range(every - 1):
        iterations.assign(number)
        step(tf.constant(2.0))
    iterations.assign(every - 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="drifted") as error:
        step(tf.constant(2.0))
    assert "same" not in str(error.value).partition("drifted apart:")[2].partition("A layer")[0]
