"""Gradients of half-precision weights are summed in float32: 256 + 1 + 1 + 1 is 259, not the 256 of bfloat16."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from training import strategy_for

# Next to 256 bfloat16 has 258, next to 2048 float16 has 2050: added one by one, the small ones would be lost.
PARTS = {"bfloat16": (256.0, 1.0, 1.0, 1.0), "float16": (2048.0, 1.0, 1.0, 1.0)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_they_are_summed_in_float32(zero_stage, dtype):
    strategy = strategy_for(4, zero_stage)
    with strategy.scope():
        layer = keras.layers.Dense(3, use_bias=False, kernel_initializer="zeros", dtype=dtype)
        layer.build((None, 2))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(layer.trainable_variables)
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(PARTS[dtype][context.replica_id_in_sync_group], dtype)
    )

    def step(part):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer.kernel.value * part)
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)

    tf.function(lambda parts: strategy.run(step, args=(parts,)))(parts)
    expected = tf.cast(-sum(PARTS[dtype]), dtype)
    np.testing.assert_array_equal(tf.cast(layer.kernel.value, "float32"), tf.fill([2, 3], tf.cast(expected, "float32")))
