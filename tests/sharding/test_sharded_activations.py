"""A tensor that is sharded over the tensor axis carries its mark, and is whole again without padding."""

import tensorflow as tf
from ranks import rank_id, run, strategy_on

from tfdist.collectives import current_program
from tfdist.sharding.sharded_activations import ActivationShard, gathered, mark_shard, shard_of


def test_shapes_of_padded_shards():
    shard = ActivationShard(1, 7)
    assert shard.local_shape(tf.TensorShape([None, 7, 2]), 3) == [None, 3, 2]
    assert ActivationShard(0).local_shape(tf.TensorShape([None, 7]), 3) == [None, 7]
    whole = tf.ones([2, 9, 2])
    assert shard.without_padding(whole).shape == [2, 7, 2]
    assert ActivationShard(1, 9).without_padding(whole) is whole and ActivationShard(1).without_padding(whole) is whole


def test_the_mark_is_on_the_tensor_alone():
    x = tf.ones([2, 3, 4])
    assert mark_shard(x, ActivationShard(-1, 7)) is x and shard_of(x) == ActivationShard(2, 7)
    assert shard_of(tf.identity(x)) is None and shard_of(mark_shard(tf.ones([2]), None)) is None


def test_shards_are_gathered_with_their_mask():
    def on_rank():
        program, x = current_program("test"), tf.fill([2, 3], float(rank_id()))
        x._keras_mask = tf.constant([True, False])
        assert gathered(program, x) is x, "whole without a mark"
        whole = gathered(program, mark_shard(x, ActivationShard(1, 5)))
        assert whole._keras_mask is x._keras_mask and shard_of(whole) is None
        return whole

    for rank in run(strategy_on(2, tensor_parallel_size=2), on_rank):
        assert rank.tolist() == [[0, 0, 0, 1, 1]] * 2
