"""Loss scaling when one rank alone overflows: all ranks skip the step, also where the optimizer is given no variables."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from training import strategy_for

from tfdist.collectives import current_program


@pytest.mark.parametrize("zero_stage", range(4))
def test_without_variables_and_on_one_data_rank(zero_stage):
    strategy = strategy_for(2, zero_stage)
    with strategy.scope():
        weights = [keras.Variable(np.ones(3, "float32"), name="a"), keras.Variable(np.ones((2, 2), "float32"), name="b")]
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0)
        optimizer.build(weights)

    def step(worst):
        def on_rank():
            value = worst if current_program().rank == 1 else 2.0
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weights[0] * [2.0, 2.0, value]) + tf.reduce_sum(weights[1].value) * 2.0
            optimizer.apply(tape.gradient(loss, [w.value for w in weights]))

        tf.function(lambda: strategy.run(on_rank))()

    step(np.inf)
    assert float(optimizer.dynamic_scale.numpy()) == 1.0
    np.testing.assert_array_equal(weights[0].numpy(), np.ones(3))
    step(2.0)  # two ranks, divided by the scale, 1
    np.testing.assert_array_equal(weights[0].numpy(), np.full(3, -3.0))
    np.testing.assert_array_equal(weights[1].numpy(), np.full((2, 2), -3.0))
