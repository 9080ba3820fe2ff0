"""Which gradients wait until earlier ones have been reduced."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from training import strategy_for


def held_back(layers, shape, kind, zero_stage):
    """Returns, for each operation of `kind` in backward, whether it waits for the reduction of another gradient,
    or for what reads the parameter in backward."""
    strategy = strategy_for(2, zero_stage, bucket_bytes=1)
    with strategy.scope():
        model = keras.Sequential([keras.Input(shape), *layers()])
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
    batch = np.ones((4, *shape), "float32"), np.ones((4, *model.output_shape[1:]), "float32")
    step = tf.function(lambda x, y: strategy.run(lambda *rows: model.train_step(rows), args=(x, y)))
    graph = step.get_concrete_function(*map(tf.constant, batch)).graph
    made = [one for one in graph.get_operations() if one.type == kind and "gradient_tape" in one.name]
    return [any("sgd" in before.name or "gradient_tape" in before.name for before in one.control_inputs) for one in made]


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_large_gradients_wait(zero_stage):
    waits = held_back(lambda: [keras.layers.Dense(64) for _ in range(5)], (64,), "MatMul", zero_stage)
    assert sum(waits) >= 2 * 3, waits  # of five on each of two ranks, but for the first two


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_gradients_smaller_than_what_they_keep_do_not(zero_stage):
    waits = held_back(
        lambda: [keras.layers.Conv2D(4, 3, padding="same") for _ in range(5)], (12, 12, 4), "Conv2DBackpropFilter", zero_stage
    )
    assert len(waits) >= 5 and not any(waits), waits
