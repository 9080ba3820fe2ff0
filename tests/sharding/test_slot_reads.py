"""A slot reads whole in a rank's function, by one message, and as what the rank stores where an optimizer steps."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from ranks import run, strategy_on

from tfdist.collectives import current_program
from tfdist.sharding.gradient_stubs import GradientStubs
from tfdist.sharding.slot_reads import SlotReads

VALUE = np.arange(1, 6, dtype="float32")  # 2 elements a rank of 3, one of padding


def sharded(num_ranks, zero_stage=3):
    strategy = strategy_on(num_ranks, zero_stage=zero_stage)
    with strategy.scope():
        return strategy, tf.Variable(VALUE)


def test_whole_except_in_a_step_of_an_optimizer():
    strategy, slot = sharded(3)

    def on_rank():
        reads = current_program("test").part(SlotReads)
        with reads.stepping():
            stored = reads.read(slot)
        assert stored is slot.component(current_program("test").rank)
        return stored.read_value(), reads.read(slot)

    for rank, (stored, whole) in enumerate(run(strategy, on_rank)):
        np.testing.assert_array_equal(whole, VALUE)
        np.testing.assert_array_equal(stored, np.pad(VALUE, (0, 1))[2 * rank : 2 * rank + 2])
    assert strategy.last_plan.counts() == {"all_gather": 1}


def test_a_loop_can_read_none():
    strategy, slot = sharded(2)

    def on_rank():
        reads = current_program("test").part(SlotReads)
        return tf.while_loop(lambda n, s: n < 2, lambda n, s: (n + 1, s + reads.read(slot)), (0, tf.zeros([5])))

    with pytest.raises(NotImplementedError, match="is read in a loop"):
        run(strategy, on_rank)


@pytest.mark.parametrize("is_stepping", [False, True])
def test_what_the_program_writes_gets_sums(is_stepping):
    """A slot that an optimizer's own step writes is none of these."""
    strategy, slot = sharded(2)

    def on_rank():
        program = current_program("test")
        reads, stubs = program.part(SlotReads), program.part(GradientStubs)
        with reads.stepping() if is_stepping else contextlib.nullcontext():
            reads.note_written(slot)
        value = tf.stack([1.0, 2.0, 3.0])
        tf.raw_ops.AssignAddVariableOp(resource=slot.component(program.rank).handle, value=value)
        [writer] = value.consumers()
        assert stubs.gets_summand(writer, value) is is_stepping
        return []

    run(strategy, on_rank)
