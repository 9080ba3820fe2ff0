"""Updated shards of several parameters reach every rank's copies in one message."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import rank_id, run, strategy_on

from tfdist.collectives import current_program
from tfdist.optimizers.publication import publish
from tfdist.optimizers.target import Target

VALUES = [np.arange(1, 6, dtype="float32"), np.float32(9), np.arange(14, dtype="float32").reshape(7, 2)]


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_copies_are_those_of_the_shards(zero_stage):
    strategy = strategy_on(3, zero_stage=zero_stage)
    with strategy.scope():
        variables = [tf.Variable(tf.zeros_like(value)) for value in VALUES]

    def on_rank():
        config, program = strategy.sharding_config, current_program("test")
        targets = [Target.of(variable, config, program) for variable in variables]
        sizes = [target.state_layout.shard_elements for target in targets]
        flats = [np.pad(value.reshape(-1), (0, 3 * size - value.size)) for value, size in zip(VALUES, sizes, strict=True)]
        shards = [tf.constant(flat.reshape(3, -1)[rank_id()]) for flat in flats]
        done = publish(targets, shards, "test", config, program)
        with tf.control_dependencies([done]):
            return targets[-1].stored.read_value()

    np.testing.assert_array_equal(run(strategy, on_rank), [VALUES[-1]] * 3)
    for variable, value in zip(variables, VALUES, strict=True):
        for copy in variable.values:
            np.testing.assert_array_equal(copy, value)
    assert strategy.last_plan.counts() == {"all_gather": 1}
