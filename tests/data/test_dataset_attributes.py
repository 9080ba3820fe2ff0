"""The private attributes of TensorFlow's objects that tfdist/data/signature.py reads: they exist and hold what it expects."""

import numpy as np
import pytest
import tensorflow as tf

Dataset = tf.data.Dataset


def test_inputs_and_functions_of_datasets():
    first, second = Dataset.range(3), Dataset.range(3)
    assert first._inputs() == [] and first._functions() == []
    zipped = Dataset.zip((first, second))
    assert [id(node) for node in zipped._inputs()] == [id(first), id(second)]
    mapped = zipped.map(lambda a, b: a)
    assert mapped._inputs() == [zipped]
    (function,) = mapped._functions()
    assert {op.type for op in function.function.graph.get_operations()} >= {"Placeholder", "Identity"}
    wrapped = tf.compat.v1.data.Dataset.range(3)
    assert isinstance(wrapped, tf.compat.v1.data.Dataset) and isinstance(wrapped._dataset, tf.data.Dataset)


def test_functions_of_a_graph():
    noisy = tf.function(lambda x: x + tf.random.normal([]))
    graph = tf.function(lambda x: noisy(x)).get_concrete_function(tf.TensorSpec([])).graph
    (nested,) = graph._functions.values()
    assert "RandomStandardNormal" in [op.type for op in nested.graph.get_operations()]
    assert nested.name


ATTRIBUTES = [
    (lambda: Dataset.range(9).shuffle(5, seed=2), {"_buffer_size": 5, "_seed2": 2, "_reshuffle_each_iteration": True}),
    (lambda: Dataset.range(2, 9, 3), {"_start": 2, "_stop": 9, "_step": 3}),
    (lambda: Dataset.range(9).batch(2, drop_remainder=True), {"_batch_size": 2, "_drop_remainder": True}),
    (lambda: Dataset.range(9).batch(2, num_parallel_calls=2), {"_batch_size": 2, "_deterministic": "default"}),
    (lambda: Dataset.range(9).padded_batch(2), {"_batch_size": 2, "_drop_remainder": False}),
    (lambda: Dataset.range(9).batch(3).rebatch([1, 2]), {"_batch_sizes": [1, 2], "_drop_remainder": False}),
    (lambda: Dataset.range(9).window(2, 3, 4), {"_size": 2, "_shift": 3, "_stride": 4, "_drop_remainder": False}),
    (lambda: Dataset.range(9).take(2), {"_count": 2}),
    (lambda: Dataset.range(9).skip(2), {"_count": 2}),
    (lambda: Dataset.range(9).repeat(2), {"_count": 2}),
    (lambda: Dataset.range(9).shard(3, 1), {"_num_shards": 3, "_index": 1}),
    (lambda: Dataset.range(9).interleave(lambda x: Dataset.range(x), 2, 3), {"_cycle_length": 2, "_block_length": 3}),
    (lambda: Dataset.range(9).map(abs, num_parallel_calls=2, deterministic=True), {"_deterministic": "true"}),
    (lambda: Dataset.random(seed=3, rerandomize_each_iteration=True), {"_seed2": 3, "_rerandomize": True}),
    (lambda: Dataset.choose_from_datasets([Dataset.range(3)] * 2, Dataset.range(2)), {"_stop_on_empty_dataset": True}),
    (lambda: Dataset.from_tensors([7]), {"_tensors": [[7]]}),
    (lambda: Dataset.from_tensor_slices([7]), {"_tensors": [[7]]}),
]


@pytest.mark.parametrize("build, expected", ATTRIBUTES)
def test_attributes_of_datasets(build, expected):
    dataset = build()
    for name, value in expected.items():
        assert np.array_equal(getattr(dataset, name), value), name


def test_file_names_of_readers():
    for reader in (tf.data.TextLineDataset(["a"]), tf.data.FixedLengthRecordDataset(["a"], 4)):
        assert reader._inputs() == [] and isinstance(reader._filenames, tf.data.Dataset)
    (names,) = tf.data.TFRecordDataset(["a"])._inputs()
    assert names._tensors[0].numpy().tolist() == [b"a"]
