"""Averages move on what each rank keeps; a constraint sees whole weights, by a message only where it must."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import run, strategy_on

from tfdist.collectives import current_program
from tfdist.optimizers.after_update import constrain, update_averages

VALUE = np.arange(-7, 8, dtype="float32").reshape(5, 3)


def made(zero_stage, value=VALUE):
    strategy = strategy_on(2, zero_stage=zero_stage)
    with strategy.scope():
        return strategy, keras.Variable(value)


@pytest.mark.parametrize(("iterations", "overwrites"), [(0, False), (1, True), (2, False), (3, True)])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_averages(zero_stage, iterations, overwrites):
    """Before the first step the average is the weight; every second step overwrites the weight."""
    strategy, weight = made(zero_stage)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(use_ema=True, ema_momentum=0.75, ema_overwrite_frequency=2)
        optimizer.build([weight])
    optimizer.iterations.assign(iterations)
    [average] = optimizer._model_variables_moving_average
    average.assign(np.full(VALUE.shape, 4.0))

    def on_rank():
        update_averages(optimizer, strategy.sharding_config, current_program("test"))
        return []

    run(strategy, on_rank)
    expected = 0.75 * 4 + 0.25 * VALUE if iterations else VALUE
    np.testing.assert_allclose(average.numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(weight.numpy(), expected if overwrites else VALUE, rtol=1e-6)
    assert strategy.last_plan.counts() == ({"all_gather": 1} if zero_stage == 2 else {})


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize(
    ("constraint", "is_elementwise"), [(keras.constraints.NonNeg, True), (keras.constraints.UnitNorm, False)]
)
def test_constraints(constraint, is_elementwise, zero_stage):
    strategy, weight = made(zero_stage)
    with strategy.scope():
        other = keras.Variable(VALUE + 1)
    weight.constraint = constraint()

    def on_rank():
        constrain([other, weight], strategy.sharding_config, current_program("test"))
        return []

    run(strategy, on_rank)
    np.testing.assert_allclose(weight.numpy(), constraint()(tf.constant(VALUE)), rtol=1e-6)
    np.testing.assert_array_equal(other.numpy(), VALUE + 1)
    assert strategy.last_plan.counts() == ({"all_gather": 1} if zero_stage == 3 and not is_elementwise else {})
