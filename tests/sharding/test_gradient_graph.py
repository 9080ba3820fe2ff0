"""What is linear in gradients, or computed of them, as the graph grows and changes: nothing stays that was found and is wrong."""

import tensorflow as tf

from tfdist.graphs import tape
from tfdist.sharding.gradient_graph import Derived, Sources


def linear_in(leaves):
    return Derived(lambda x: frozenset([x.name]) if x.name in leaves else None)


def test_what_becomes_a_gradient_later_makes_what_follows_linear():
    """As a gradient that comes out of a loop, which is found when the loop is looked at."""
    leaves = set()
    linear = linear_in(leaves)
    with tf.Graph().as_default():
        grad = tf.compat.v1.placeholder(tf.float32, [3])
        half = grad / 2.0
        shifted, norm = half - tf.reduce_mean(half), tf.norm(half)
        assert all(linear.of(x) is None for x in (grad, half, shifted, norm))
        leaves.add(grad.name)
        linear.forget(grad)
        assert [linear.of(x) for x in (half, shifted, norm)] == [{grad.name}, {grad.name}, None]


def test_what_reads_something_else_is_looked_at_again():
    """As what a user's code has read of a summand reads the sum since."""
    with tf.Graph().as_default():
        summand, whole = tf.compat.v1.placeholder(tf.float32, [3]), tf.compat.v1.placeholder(tf.float32, [3])
        clipped = tf.clip_by_value(summand, -1.0, 1.0)
        scaled = clipped * 2.0
        sources = Sources(lambda x: x is whole)
        linear = linear_in({summand.name})
        assert not sources.of(scaled) and linear.of(summand * 2.0) == {summand.name}
        for reader in list(summand.consumers()):
            tape.reconnect(reader, summand, whole)
        assert sources.of(scaled) == {whole.name}
        assert all(linear.of(x) is None for reader in whole.consumers() for x in reader.outputs)
