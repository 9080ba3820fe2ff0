"""What an owner steps on is whole, by one message of gradients and weights; what it has written reaches the others."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import rank_id, run, strategy_on

from tfdist.collectives import current_program
from tfdist.optimizers.owned_step import complete, publish
from tfdist.optimizers.target import Target, local_part

VALUES = [np.arange(1, 6, dtype="float32"), np.arange(14, dtype="float32").reshape(7, 2)]


@pytest.mark.parametrize(("zero_stage", "count"), [(0, 0), (1, 1), (3, 1)])
def test_gradients_and_weights_are_completed_together(zero_stage, count):
    strategy = strategy_on(3, zero_stage=zero_stage)
    with strategy.scope():
        variables = [tf.Variable(value) for value in VALUES]

    def on_rank():
        config, program = strategy.sharding_config, current_program("test")
        targets = [Target.of(variable, config, program) for variable in variables]
        grads = [target.read(target.stepped) * 10 for target in targets]
        found, weights = complete(grads, targets, 0, program)
        return [*found, *weights]

    for found in run(strategy, on_rank):
        for tensor, value in zip(found, [*(10 * value for value in VALUES), *VALUES], strict=True):
            np.testing.assert_array_equal(tensor, value)
    assert strategy.last_plan.counts() == ({"all_gather": count} if count else {})


def test_others_get_the_owners_weights_and_the_slots_that_all_keep():
    strategy = strategy_on(3, zero_stage=0)
    with strategy.scope():
        variables = [keras.Variable(value) for value in VALUES]
        optimizer = keras.optimizers.SGD(momentum=0.9)
        optimizer.build(variables)

    def on_rank():
        program, number = current_program("test"), rank_id() + 1.0
        targets = [Target.of(variable, strategy.sharding_config, program) for variable in variables]
        for slot in optimizer.momentums:
            local_part(slot.value, program).assign(tf.fill(slot.shape, 10 * number))
        publish(optimizer, targets, [tf.fill(value.shape, number) for value in VALUES], 1, 0, program)
        return []

    run(strategy, on_rank)
    for variable, slot in zip(variables, optimizer.momentums, strict=True):
        assert all((copy.numpy() == 2).all() for copy in variable.value.values)
        assert all((copy.numpy() == 20).all() for copy in slot.value.values)
    assert strategy.last_plan.counts() == {"broadcast": 1}
