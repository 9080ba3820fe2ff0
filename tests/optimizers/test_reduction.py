"""Full gradients of a bucket become sums over the data axis, in one message: shards, or whole; half precision sums as float32."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import rank_id, run, strategy_on

from tfdist.collectives import current_program
from tfdist.optimizers.reduction import reduce_bucket
from tfdist.optimizers.target import Target

SHAPES = [(5, 3), (), (2,)]


@pytest.mark.parametrize("weight", [None, 0.5])
@pytest.mark.parametrize(("zero_stage", "op"), [(0, "all_reduce"), (1, "reduce_scatter")])
def test_sums(zero_stage, op, weight):
    strategy = strategy_on(3, zero_stage=zero_stage)
    with strategy.scope():
        variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]

    def on_rank():
        program, config = current_program("test"), strategy.sharding_config
        targets = [Target.of(variable, config, program) for variable in variables]
        grads = [tf.fill(shape, float(10**place * (rank_id() + 1))) for place, shape in enumerate(SHAPES)]
        found = reduce_bucket(grads, targets, "0", config, program, None if weight is None else tf.constant(weight))
        assert [x.shape for x in found] == [target.state_layout.component_shape for target in targets]
        return found

    ranks = run(strategy, on_rank)
    for place, shape in enumerate(SHAPES):
        flat = [np.ravel(rank[place]) for rank in ranks]
        size = int(np.prod(shape))
        whole = np.concatenate(flat)[:size] if zero_stage else flat[2]
        assert whole.tolist() == [6 * 10**place * (weight or 1)] * size
    assert strategy.last_plan.counts() == {op: 1}


def test_half_precision_is_summed_as_float32():
    """As float16 2048 + 1 + 1 is 2048, in any order of the ranks but one."""
    strategy = strategy_on(3, zero_stage=0)
    with strategy.scope():
        variable = tf.Variable(tf.zeros([5], tf.float16))

    def on_rank():
        program, config = current_program("test"), strategy.sharding_config
        grad = tf.fill([5], tf.constant(2048.0 if rank_id() == 0 else 1.0, tf.float16))
        return reduce_bucket([grad], [Target.of(variable, config, program)], "0", config, program)

    assert [rank[0].tolist() for rank in run(strategy, on_rank)] == [[2050] * 5] * 3
    assert [record.dtype for record in strategy.last_plan.records[0]] == ["float32"]
