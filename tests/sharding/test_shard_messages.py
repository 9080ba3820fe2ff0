"""Shards become whole tensors, and summands become shards of their sum: inverses but for the sum."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import integers, rank_id, run, strategy_on

from tfdist.collectives import current_program
from tfdist.sharding import Layout, Replicate, Shard
from tfdist.sharding.shard_messages import SumOfGradients, gather_shards, gather_shards_in_buckets

SHAPES = [(5, 3), (1,), (), (7,)]  # padded, fewer elements than ranks, a scalar


def layouts_of(strategy, data=None):
    return [Layout(shape, strategy.mesh, data=data or Shard()) for shape in SHAPES]


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_sums_are_scattered_and_gathered(devices):
    strategy = strategy_on(devices)
    layouts = layouts_of(strategy)
    summands = [[integers(np.random.default_rng(rank), shape) for shape in SHAPES] for rank in range(devices)]

    def on_rank(values):
        program = current_program("test")
        variables = [None] * len(values)  # they are looked at where gradients are compressed
        message = SumOfGradients(program, strategy.sharding_config, variables, layouts, "scatter")
        shards = message.scattered(values, tf.float32)
        for shard, layout in zip(shards, layouts, strict=True):
            assert shard.shape == layout.component_shape
        return gather_shards(program, shards, layouts, "gather")

    for wholes in run(strategy, on_rank, summands):
        for place, whole in enumerate(wholes):
            np.testing.assert_array_equal(whole, sum(values[place] for values in summands))
    assert strategy.last_plan.counts() == ({} if devices == 1 else {"reduce_scatter": 1, "all_gather": 1})


def test_buckets_and_what_is_not_sharded():
    """The scalar of each rank stays with it and comes first; the others travel in messages of at most 32 bytes, or alone."""
    strategy = strategy_on(2)
    layouts = layouts_of(strategy)
    layouts[2] = Layout((), strategy.mesh, data=Replicate())

    def on_rank():
        values = [tf.fill(layout.component_shape, float(rank_id())) for layout in layouts]
        found = list(gather_shards_in_buckets(current_program("test"), values, layouts, 32, "gather"))
        assert [place for place, _ in found] == [2, 0, 1, 3]
        return [tf.reduce_sum(whole) for _, whole in found]

    assert run(strategy, on_rank) == [[0, 7, 0, 3], [1, 7, 0, 3]]
    assert [record.label for record in strategy.last_plan.records[0]] == ["gather_0", "gather_1"]
