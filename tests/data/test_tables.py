"""Digests of lookup tables: what is in them, not in which order it was put there."""

import keras
import pytest
import tensorflow as tf

from tfdist.data import signature
from tfdist.data.tables import digests_of_tables


def digests(lookup, value):
    return digests_of_tables(tf.function(lookup).get_concrete_function(tf.reshape(value, [1])).graph)


def static(keys, values, default):
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), default).lookup


def mutable(keys, values, default):
    table = tf.lookup.experimental.MutableHashTable(tf.constant(keys).dtype, tf.constant(values).dtype, default)
    table.insert(keys, values)
    return table.lookup


PAIRS = [
    (["a", "b", "c"], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [0.0, 0.0]),
    (["a", "b", "c"], tf.constant([1, 2, 3], tf.int64), -1),
    (tf.constant([1, 2, 3], tf.int64), ["a", "b", "c"], ""),
    (tf.constant([1, 2, 3], tf.int64), tf.constant([3, 2, 9], tf.int64), -1),
    (["a", "b", "c"], [1.0, 2.0, 3.0], 0.0),
]


@pytest.mark.parametrize(
    ("kind", "keys", "values", "default"),
    [
        *((kind, *pairs) for kind in (static, mutable) for pairs in PAIRS[kind is static :]),
        (static, ["a", "b", "c"], ["x", "y", "z"], ""),
    ],
)
def test_pairs_count_and_no_order(kind, keys, values, default):
    keys, values = tf.convert_to_tensor(keys), tf.convert_to_tensor(values)
    value = keys[0]
    (one,) = digests(kind(keys, values, default), value)
    assert digests(kind(tf.reverse(keys, [0]), tf.reverse(values, [0]), default), value) == [one]
    assert digests(kind(keys, tf.reverse(values, [0]), default), value) != [one]
    assert digests(kind(keys[:2], values[:2], default), value) != [one]


def test_what_is_no_table_has_none():
    variable, queue = tf.Variable(1.0), tf.raw_ops.MutexV2(container="", shared_name="")
    run = tf.function(lambda x: (variable + 1.0, tf.raw_ops.MutexLock(mutex=queue))[0])
    assert digests_of_tables(run.get_concrete_function(1.0).graph) == []


def adapted(layer, data):
    layer.adapt(data)
    return layer


@pytest.mark.parametrize(
    ("layers", "key"),
    [
        ([keras.layers.StringLookup(vocabulary=words) for words in (["a", "b"], ["b", "a"])], "tables"),
        ([adapted(keras.layers.TextVectorization(), tf.constant(words)) for words in (["a b"], ["c d"])], "tables"),
        ([adapted(keras.layers.Normalization(axis=None), tf.constant(x)) for x in ([1.0, 2.0], [1.0, 5.0])], "floats"),
        ([adapted(keras.layers.Discretization(num_bins=2), tf.constant(x)) for x in ([1.0, 2.0], [4.0, 5.0])], "functions"),
    ],
    ids=["lookup", "text", "normalization", "discretization"],
)
def test_layers_in_the_functions_of_a_dataset(layers, key):
    data = tf.data.Dataset.from_tensors([1.0] if key != "tables" else ["a"])
    here, same, there = [signature.dataset_signature(data.map(layer)) for layer in (layers[0], layers[0], layers[1])]
    assert signature.difference(here, same) is None
    assert f"{key}=" in signature.difference(here, there)
