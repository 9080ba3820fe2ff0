"""Who reads a gathered parameter, also by its views; a view is made again on the second copy."""

import tensorflow as tf

from tfdist.sharding.units import copy_of, is_view, readers_of, sources_of


def test_readers_of_views():
    with tf.Graph().as_default():
        weight, x = tf.ones([3, 5]), tf.ones([2, 3])
        view = tf.cast(tf.reshape(weight, [5, 3]), tf.float16)
        product, root = tf.matmul(x, weight), tf.sqrt(view)
        tf.sqrt(root)
        readers = list(readers_of(weight, 7, {weight.name}))
    assert {reader.operation for reader in readers} == {product.op, root.op}
    assert {reader.variable for reader in readers} == {7}
    assert next(one for one in readers if one.operation is root.op).tensor is view


def test_what_joins_gathered_tensors_alone_is_a_view():
    with tf.Graph().as_default():
        one, two, other = tf.ones([3]) * 2, tf.ones([3]) * 3, tf.ones([3]) * 4
        joined, mixed = tf.concat([one, two, tf.zeros([1])], 0), tf.concat([one, other], 0)
        total = tf.sqrt(joined)
        gathered = {one.name, two.name}
        readers = [reader.operation for reader in readers_of(one, 1, gathered)]
    assert is_view(joined, gathered) and not is_view(mixed, gathered)
    assert not is_view(one, gathered) and not is_view(total, gathered)
    assert len(readers) == 2 and set(readers) == {total.op, mixed.op}
    assert {x.name for x in sources_of(joined, gathered)} >= gathered


def test_joined_tensors_are_read_once():
    with tf.Graph().as_default():
        one, two = tf.ones([3]) * 2, tf.ones([3]) * 3
        total, gathered, joined = tf.sqrt(tf.concat([one, two], 0)), {one.name, two.name}, set()
        assert [x.operation for x in readers_of(one, 1, gathered, joined)] == [total.op]
        assert list(readers_of(two, 2, gathered, joined)) == []


def test_views_are_made_again_of_the_copy():
    with tf.Graph().as_default():
        first, second = tf.ones([3, 5]) * 2, tf.ones([3, 5]) * 3
        flat = tf.reshape(first, [15])
        view, beside = tf.cast(flat, tf.float16), tf.concat([flat, tf.zeros([1])], 0)
        copies = {first.name: second}
        copy, joined = copy_of(view, copies), copy_of(beside, copies)
        assert copy.op.type == "Cast" and copy.dtype == tf.float16 and copy.shape == [15]
        assert copy.op.inputs[0] is copies[flat.name] and copies[flat.name].op.inputs[0] is second
        assert joined.op.inputs[0] is copies[flat.name], "one copy of what both views read"
        assert copy_of(view, copies) is copy
