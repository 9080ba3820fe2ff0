"""Signatures of datasets: equal for equal programs, different for different ones; what is drawn without a seed."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.eager import context

from tfdist.data.signature import dataset_signature, difference, unordered, unseeded

Dataset = tf.data.Dataset
AUTOTUNE = tf.data.AUTOTUNE


def rows(count=33, seed=0):
    """Features and integer labels, the same for one seed."""
    random = np.random.default_rng(seed)
    return random.normal(size=(count, 3)).astype(np.float32), random.integers(0, 10, count)


def shuffled(*, count=33, buffer_size=8, batch_size=4, seed=None, data_seed=0, **shuffle):
    dataset = Dataset.from_tensor_slices(rows(count, data_seed)).shuffle(buffer_size, seed=seed, **shuffle)
    return dataset.batch(batch_size).prefetch(AUTOTUNE)


def keras_arrays(*, count=33, batch_size=4, shuffle=True, data_seed=0):
    """What `model.fit(x, y, batch_size=..., shuffle=...)` iterates."""
    return ArrayDataAdapter(*rows(count, data_seed), batch_size=batch_size, shuffle=shuffle).get_tf_dataset()


def noisy(x):
    return x + tf.random.normal([])


def loop_and_branch(x):
    """AutoGraph turns this in functions within functions."""
    call = tf.function(noisy)  # a new one each time: its seeds stay those of its first tracing
    total = tf.constant(0.0)
    for _ in range(2):
        if tf.random.uniform([]) > 0.5:
            total = call(total)
    while total > 1.0:
        total -= tf.random.uniform([])
    return tf.cast(x, tf.float32) + total


def flip():
    """An augmentation as Keras users write it."""
    layers = [keras.layers.RandomFlip(), keras.layers.RandomRotation(0.1)]

    def apply(image):
        for layer in layers:
            image = layer(image, training=True)
        return image

    return Dataset.from_tensors(np.zeros([4, 8, 8, 3], np.float32)).map(apply, num_parallel_calls=2)


def generator():
    return Dataset.from_generator(lambda: iter([]), output_signature=tf.TensorSpec([], tf.int32))


def shuffled_inside(_):
    return Dataset.range(5).shuffle(3).map(lambda x: x + tf.random.uniform([], 0, 3, tf.int64))


PIPELINES = {
    "shuffle": shuffled,
    "keras": keras_arrays,
    "keras batches": lambda: keras_arrays(shuffle="batch"),
    "keras layers": flip,
    "generator": lambda: generator().filter(lambda x: x > 1).batch(2),
    "slices": lambda: Dataset.range(20).skip(1).take(15).shard(3, 1).repeat(2).cache().enumerate(),
    "windows": lambda: Dataset.range(9).window(3, shift=2).flat_map(lambda window: window.batch(3)).rebatch([1, 2]),
    "sample": lambda: Dataset.sample_from_datasets([Dataset.range(3), Dataset.range(4).repeat()], [0.5, 0.5]),
    "choose": lambda: Dataset.choose_from_datasets([Dataset.range(3), Dataset.range(4)], Dataset.range(2)),
    "zip": lambda: Dataset.zip((Dataset.range(3), {"x": Dataset.range(3).concatenate(Dataset.range(2))})),
    "random": lambda: Dataset.random().take(3).unique().scan(np.int64(0), lambda state, x: (state, x)),
    "functions": lambda: Dataset.range(3).map(loop_and_branch).apply(tf.data.experimental.ignore_errors()),
    "inside": lambda: Dataset.range(3).interleave(shuffled_inside, num_parallel_calls=2),
    "parallel": lambda: Dataset.range(3).map(lambda x: x + 1, num_parallel_calls=AUTOTUNE).padded_batch(2),
    "ragged": lambda: Dataset.from_tensor_slices(tf.ragged.constant([[1], [], [2, 3]])).ragged_batch(2),
    "sparse": lambda: Dataset.from_tensor_slices(tf.sparse.from_dense(np.eye(3))).batch(2),
    "strings": lambda: Dataset.from_tensors(["a", "b"]).unbatch().map(tf.strings.length),
    "empty": lambda: Dataset.range(0),
    "v1": lambda: tf.compat.v1.data.Dataset.range(4).shuffle(3),
}


def signature(build, global_seed=1, **arguments):
    if global_seed is not None:
        keras.utils.set_random_seed(global_seed)
    return dataset_signature(build(**arguments))


@pytest.fixture
def no_global_seed():
    """As in a program that never sets one; `set_random_seed` cannot take it back."""
    before = context.global_seed()
    context.set_global_seed(None)
    yield
    context.set_global_seed(before)


def all_signatures():
    return {name: json.dumps(signature(build)) for name, build in PIPELINES.items()}


@pytest.mark.parametrize("name", PIPELINES)
def test_equal_programs_have_equal_signatures(name):
    one, other = signature(PIPELINES[name]), signature(PIPELINES[name])
    assert difference(one, other) is None
    assert one == other
    assert json.loads(json.dumps(one)) == one
    assert unseeded(one) == []
    assert len(json.dumps(one)) < 3000


def test_another_process_with_the_same_program_has_the_same_signatures():
    """With other string hashes, which order Python's sets, and other numbers of functions traced before."""
    environment = {**os.environ, "PYTHONHASHSEED": "12", "TF_CPP_MIN_LOG_LEVEL": "2"}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
    theirs = json.loads(run.stdout.splitlines()[-1])
    mine = all_signatures()
    for name, text in mine.items():
        assert difference(json.loads(text), json.loads(theirs[name])) is None, name
    assert mine == theirs


CHANGES = [
    # (build, arguments of the other worker, what tells them apart)
    (shuffled, {"seed": 5}, "ShuffleDataset: seed2="),
    (shuffled, {"buffer_size": 9}, "ShuffleDataset: buffer_size=8 here, buffer_size=9 there"),
    (shuffled, {"batch_size": 5}, "dataset: cardinality=9 here, cardinality=7 there"),
    (shuffled, {"count": 34}, "TensorSliceDataset: cardinality=33 here, cardinality=34 there"),
    (shuffled, {"data_seed": 1}, "TensorSliceDataset: head="),
    (shuffled, {"reshuffle_each_iteration": False}, "ShuffleDataset: reshuffle_each_iteration=True here"),
    (keras_arrays, {"count": 34}, "functions="),
    (keras_arrays, {"batch_size": 5}, "FlatMapDataset: functions="),
    (keras_arrays, {"data_seed": 1}, "TensorDataset: head="),
    (keras_arrays, {"shuffle": False}, "RandomShuffle in MapDataset(seed=1, seed2=0) here, MapDataset"),
]


@pytest.mark.parametrize("build, change, words", CHANGES)
def test_another_argument_is_found(build, change, words):
    one, other = signature(build), signature(build, **change)
    found = difference(one, other)
    assert found is not None and words in found, found


@pytest.mark.parametrize("name", PIPELINES)
def test_an_additional_transformation_is_found(name):
    one = signature(PIPELINES[name])
    for add in (lambda dataset: dataset.map(lambda *x: x), lambda dataset: dataset.take(1000), lambda dataset: dataset.repeat(1)):
        other = signature(lambda add=add: add(PIPELINES[name]()))
        assert difference(one, other) and difference(other, one)


@pytest.mark.parametrize("build", [shuffled, keras_arrays])
def test_another_global_seed_is_found(build):
    assert "seed=1 here, seed=2 there" in difference(signature(build), signature(build, global_seed=2))


def test_a_random_op_too_many_is_found():
    """As when only the chief draws something before it builds its dataset."""
    one = signature(shuffled)
    keras.utils.set_random_seed(1)
    tf.random.uniform([])
    assert "ShuffleDataset: seed2=" in difference(one, dataset_signature(shuffled()))


def test_other_code_in_a_function_is_found():
    def adding(number):
        return dataset_signature(Dataset.range(3).map(lambda x: x + number))

    assert difference(adding(1), adding(1)) is None
    assert "MapDataset: functions=" in difference(adding(1), adding(2))


def test_the_order_of_inputs_is_found():
    a, b = Dataset.range(3), Dataset.range(4)
    assert difference(dataset_signature(Dataset.zip((a, b))), dataset_signature(Dataset.zip((b, a))))
    assert difference(dataset_signature(a.concatenate(b).take(2)), dataset_signature(b.concatenate(a).take(2)))


def test_what_workers_may_differ_in():
    """Prefetching, threads, parallelism, the folder of the data."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = 2
    plain = Dataset.from_tensor_slices(["/here/a", "/here/b"]).map(tf.strings.length, num_parallel_calls=2)
    other = Dataset.from_tensor_slices(["/there/a", "/there/b"]).prefetch(3).map(tf.strings.length, num_parallel_calls=4)
    assert difference(dataset_signature(plain), dataset_signature(other.with_options(options).prefetch(2))) is None


@pytest.mark.parametrize("reader", [tf.data.TextLineDataset, tf.data.TFRecordDataset, "fixed"])
def test_file_names(reader, tmp_path):
    if reader == "fixed":
        reader = lambda names: tf.data.FixedLengthRecordDataset(names, 4)  # noqa: E731
    names = [str(tmp_path / name) for name in "abc"]  # they need not exist: nothing is read
    one = dataset_signature(reader(names))
    assert one == dataset_signature(reader([f"/elsewhere/{name}" for name in "abc"]))
    assert "head=" in difference(one, dataset_signature(reader(names[::-1])))
    assert "cardinality=3 here, cardinality=2 there" in difference(one, dataset_signature(reader(names[:2])))


def test_the_words_of_a_difference():
    one, other = Dataset.range(3).shuffle(4, seed=1), Dataset.range(3)
    found = difference(dataset_signature(one), dataset_signature(other))
    assert found.startswith("ShuffleDataset(seed=") and " here, RangeDataset(start=0, stop=3, " in found
    shorter, longer = [["dataset", {}]], [["dataset", {}], ["CacheDataset", {}]]
    assert difference(shorter, longer) == "nothing more here, CacheDataset there"
    assert difference(longer, shorter) == "CacheDataset here, nothing more there"


UNSEEDED = [
    (shuffled, {}, ["ShuffleDataset(buffer_size=8)"]),
    (shuffled, {"reshuffle_each_iteration": False}, ["ShuffleDataset(buffer_size=8)"]),
    (shuffled, {"seed": 3}, []),
    (shuffled, {"seed": 0}, []),
    (shuffled, {"buffer_size": 1}, []),
    (keras_arrays, {}, ["RandomShuffle in MapDataset"]),
    (keras_arrays, {"shuffle": "batch"}, ["RandomShuffle in MapDataset"]),
    (keras_arrays, {"shuffle": False}, []),
    (PIPELINES["sample"], {}, ["RandomDataset"]),
    (PIPELINES["functions"], {}, ["RandomStandardNormal in MapDataset", "RandomUniform in MapDataset"]),
    (PIPELINES["inside"], {}, [f"{op} in ParallelInterleaveDataset" for op in ("RandomUniformInt", "ShuffleDatasetV3")]),
    (PIPELINES["v1"], {}, ["ShuffleDataset(buffer_size=3)"]),
    (PIPELINES["slices"], {}, []),
    (PIPELINES["parallel"], {}, []),
]


@pytest.mark.parametrize("build, arguments, expected", UNSEEDED)
def test_unseeded(build, arguments, expected, no_global_seed):
    found = unseeded(signature(build, global_seed=None, **arguments))
    assert set(found) == set(expected)
    for seed in (0, 1):
        assert unseeded(signature(build, global_seed=seed, **arguments)) == []


def test_unseeded_means_another_order_each_time(no_global_seed):
    """The upstream behaviour that `unseeded` warns of, and that a global seed ends."""

    def order(build):
        return [int(label) for _, labels in build() for label in labels]

    for build in (shuffled, keras_arrays):
        assert len({tuple(order(build)) for _ in range(4)}) > 1
        seeded = []
        for _ in range(2):
            keras.utils.set_random_seed(4)
            dataset = build()
            seeded.append([order(lambda dataset=dataset: dataset) for _ in range(3)])
        assert seeded[0] == seeded[1]
        context.set_global_seed(None)


def test_unordered():
    options = tf.data.Options()
    options.deterministic = False
    mapped = Dataset.range(3).map(lambda x: x, num_parallel_calls=2, deterministic=False)
    assert unordered(dataset_signature(mapped)) == ["ParallelMapDataset(deterministic='false')"]
    assert unordered(dataset_signature(Dataset.range(3).with_options(options))) == ["dataset(deterministic=False)"]
    assert unordered(dataset_signature(PIPELINES["parallel"]())) == []
    batched = Dataset.range(3).batch(2, num_parallel_calls=2, deterministic=False)
    assert unordered(dataset_signature(batched)) == ["ParallelBatchDataset(deterministic='false')"]


def test_the_dataset_is_not_run():
    def forbidden(*_):
        raise AssertionError("the dataset was run")

    def call(x):
        return tf.ensure_shape(tf.py_function(forbidden, [x], tf.int64), [])

    numbers = Dataset.range(3)
    made = Dataset.from_generator(forbidden, output_signature=tf.TensorSpec([], tf.int64))
    for dataset in (
        made.shuffle(2),
        numbers.map(call),
        numbers.filter(lambda x: call(x) > 0),
        numbers.flat_map(lambda x: Dataset.range(call(x))),
    ):
        assert dataset_signature(dataset)


@pytest.mark.parametrize("build", [Dataset.from_tensors, lambda x: Dataset.from_tensor_slices(x).batch(4)])
def test_floats_in_memory(build):
    """Drawn without a seed on each worker, features alone, they were taken for the same."""
    values = np.random.default_rng(0).normal(size=(33, 65)).astype("float32")
    one, same, nearly, drawn = (
        dataset_signature(build(x)) for x in (values, values.copy(), values * np.float32(1 + 1e-6), values[::-1].copy())
    )
    assert one == same and one != nearly
    assert difference(one, nearly) is None, "last bits differ between machines"
    assert "floats=[[2145, " in difference(one, drawn)
    assert difference(one, json.loads(json.dumps(drawn))) == difference(one, drawn)


def test_large_data_is_not_read():
    """A megabyte of labels, a kilobyte of signature; later values are not looked at."""
    labels = np.zeros(1 << 17, np.int64)
    one = dataset_signature(Dataset.from_tensor_slices(labels))
    assert len(json.dumps(one)) < 1000
    labels[100] = 1
    assert dataset_signature(Dataset.from_tensor_slices(labels)) == one
    labels[10] = 1
    assert "TensorSliceDataset: head=" in difference(one, dataset_signature(Dataset.from_tensor_slices(labels)))


def test_a_dataset_that_is_used_often():
    """2^20 paths lead to the source."""
    dataset = Dataset.range(2)
    for _ in range(20):
        dataset = Dataset.zip((dataset, dataset)).map(lambda x, _: x)
    assert len(dataset_signature(dataset)) == 1 + 20 * 3 + 1


def test_the_signature_draws_nothing():
    keras.utils.set_random_seed(3)
    dataset = shuffled()
    expected = tf.random.uniform([]).numpy()
    keras.utils.set_random_seed(3)
    dataset = shuffled()
    dataset_signature(dataset)
    assert tf.random.uniform([]).numpy() == expected


def test_in_a_graph():
    entries = []

    @tf.function
    def build():
        entries.extend([dataset_signature(dataset), dataset_signature(shuffled())])
        return 0

    dataset = shuffled()
    build()
    built_outside, built_inside = map(dict, entries)
    assert list(built_outside) == list(built_inside) == ["dataset", "BatchDataset", "ShuffleDataset", "TensorSliceDataset"]
    assert built_outside["TensorSliceDataset"]["head"] == dict(dataset_signature(dataset))["TensorSliceDataset"]["head"]


def test_refusal():
    with pytest.raises(ValueError, match=r"`dataset` must be a `tf.data.Dataset`. Received: dataset=\[1\]"):
        dataset_signature([1])


if __name__ == "__main__":  # the other process
    print(json.dumps(all_signatures()))
