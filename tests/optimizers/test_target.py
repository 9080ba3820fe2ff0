"""What a rank steps on of a parameter: what it stores, or its shard of that; and what becomes of the new value."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import run, strategy_on

from tfdist.collectives import current_program
from tfdist.optimizers.target import Target

VALUE = np.arange(15, dtype="float32").reshape(5, 3)  # 8 elements a rank, one of padding


@pytest.mark.parametrize(
    ("zero_stage", "is_in_place", "is_stored_whole"), [(0, True, True), (1, False, True), (2, False, True), (3, True, False)]
)
def test_stages(zero_stage, is_in_place, is_stored_whole):
    strategy = strategy_on(2, zero_stage=zero_stage)
    with strategy.scope():
        variable = tf.Variable(VALUE)

    def on_rank():
        target = Target.of(variable, strategy.sharding_config, current_program("test"))
        assert target.is_stored and target.is_in_place is is_in_place and target.stepped is target.stored
        assert (target.stored.shape == VALUE.shape) is is_stored_whole
        read = target.read(target.stepped)
        kept = target.keep(read + 1, target.stepped)
        assert len(kept) == (0 if is_in_place else 1), "a shard of a copy is to be gathered first"
        with tf.control_dependencies(kept):
            return read, target.stored.read_value()

    whole = np.pad(VALUE.reshape(-1), (0, 1))
    for rank, (read, stored) in enumerate(run(strategy, on_rank)):
        mine = VALUE if zero_stage == 0 else whole[8 * rank : 8 * rank + 8]
        np.testing.assert_array_equal(read, mine)
        np.testing.assert_array_equal(stored, read + 1 if is_in_place else VALUE)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_global_value_is_cut(zero_stage):
    strategy = strategy_on(2, zero_stage=zero_stage)
    with strategy.scope():
        variable = tf.Variable(tf.zeros(VALUE.shape))
    run(
        strategy,
        lambda: Target.of(variable, strategy.sharding_config, current_program("test")).store_global(tf.constant(VALUE)) or [],
    )
    np.testing.assert_array_equal(variable.numpy(), VALUE)
    assert variable.values[0].shape == (VALUE.shape if zero_stage == 1 else (8,))
