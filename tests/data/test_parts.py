"""Parts of different length, and the ends of the data, on one worker's side of what several of them know."""

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.devices import names
from tfdist.data import EndOfData, parts

Dataset = tf.data.Dataset
UNKNOWN, ENDLESS = parts.UNKNOWN, parts.ENDLESS


def rows_of(dataset):
    return [len(tf.nest.flatten(batch)[0]) for batch in dataset]


def made_alike(datasets, devices=1):
    """What each worker makes of its part."""
    told = [parts.description(dataset) for dataset in datasets]
    tasks = tuple(f"worker {index}" for index in range(len(datasets)))
    each = [EndOfData(tasks, index, tuple(range(len(datasets)))) for index in range(len(datasets))]
    return [parts.as_long_as_others(dataset, told, ends, devices) for dataset, ends in zip(datasets, each, strict=True)]


@pytest.mark.parametrize(
    ("lengths", "devices", "steps", "elements"),
    [((5, 4), 1, 5, 5), ((5, 4), 2, 3, 6), ((4, 4), 2, 2, 4), ((0, 1), 2, 1, 2), ((0, 0), 1, 0, 0), ((7,), 3, 3, 9)],
)
def test_all_are_as_long_as_the_longest(lengths, devices, steps, elements):
    made = made_alike([Dataset.range(3).repeat(length).batch(3) for length in lengths], devices)
    for length, (dataset, number, ends) in zip(lengths, made, strict=True):
        assert (number, ends) == (steps, None)
        assert rows_of(dataset) == [3] * length + [0] * (elements - length)
        assert int(dataset.cardinality()) == elements


def test_parts_of_one_length_stay_as_they_are():
    for dataset, steps, ends in made_alike([Dataset.range(8).batch(4, drop_remainder=True) for _ in range(2)]):
        assert (steps, ends) == (2, None) and dataset.element_spec.shape == [4]
    first, second = made_alike([Dataset.range(8).batch(4, drop_remainder=True), Dataset.range(8).batch(4)])
    assert first[0].element_spec == second[0].element_spec and first[0].element_spec.shape == [None]


def test_endless_and_unknown_parts():
    batches = Dataset.range(4).batch(4)
    (endless, steps, _), (finite, _, ends) = made_alike([batches.repeat(), batches])
    assert (steps, ends) == (ENDLESS, None)
    assert rows_of(endless.take(3)) == [4, 4, 4] and rows_of(finite.take(3)) == [4, 0, 0]
    for other in (batches, batches.repeat()):
        for dataset, steps, ends in made_alike([other, batches.filter(lambda _: True)]):
            assert steps == UNKNOWN and isinstance(ends, EndOfData) and dataset.element_spec.shape == [None]
    assert parts.longest([3, ENDLESS, UNKNOWN]) == UNKNOWN and parts.longest([3, ENDLESS]) == ENDLESS


def test_batches_without_rows():
    spec = {
        "dense": tf.TensorSpec([4, None, 3]),
        "ragged": tf.RaggedTensorSpec([None, None, None, 2], tf.int32, ragged_rank=2),
        "sparse": tf.SparseTensorSpec([None, 5], tf.float64),
        "text": tf.TensorSpec([None], tf.string),
        "nothing": tf.NoneTensorSpec(),
    }
    assert parts.num_unknown_sizes(spec) == 1
    empty = parts.without_rows(spec, [7])
    assert empty["dense"].shape == [0, 7, 3] and empty["ragged"].shape.as_list() == [0, None, None, 2]
    assert empty["sparse"].dense_shape.numpy().tolist() == [0, 5] and empty["text"].shape == [0] and empty["nothing"] is None
    for name, of_kind in spec.items():
        if empty[name] is not None:
            assert of_kind.is_compatible_with(empty[name]) or name == "dense"
    with pytest.raises(NotImplementedError, match="no OptionalSpec without rows"):
        parts.without_rows(tf.OptionalSpec(tf.TensorSpec([3])), [])


def test_sizes_that_a_spec_does_not_know():
    spec = {
        "dense": tf.TensorSpec([None, None, 3, None]),
        "ragged": tf.RaggedTensorSpec([None, None, None, None], ragged_rank=2),
        "scalar": tf.TensorSpec([]),
        "sparse": tf.SparseTensorSpec([None, None]),
    }
    ragged = tf.RaggedTensor.from_nested_row_splits(tf.zeros([5, 6]), [[0, 2], [0, 2, 5]])
    sparse = tf.sparse.from_dense(np.ones((2, 8)))
    batch = {"dense": tf.zeros([2, 4, 3, 5]), "ragged": ragged, "scalar": tf.constant(0.0), "sparse": sparse}
    sizes = parts.unknown_sizes(batch, spec)
    assert parts.num_unknown_sizes(spec) == 4 and sizes.numpy().tolist() == [4, 5, 6, 8]
    empty = parts.without_rows(spec, tf.unstack(sizes))
    assert empty["dense"].shape == [0, 4, 3, 5] and empty["ragged"].flat_values.shape == [0, 6]
    assert empty["sparse"].dense_shape.numpy().tolist() == [0, 8]


def test_where_sizes_are_unknown_every_step_asks():
    varying = Dataset.from_generator(
        lambda: iter([np.zeros((2, 3)), np.zeros((2, 4))]), output_signature=tf.TensorSpec([None, None])
    )
    for lengths in ((2, 1), (2, 0)):
        datasets = [varying.take(length).apply(tf.data.experimental.assert_cardinality(length)) for length in lengths]
        assert [(steps, isinstance(ends, EndOfData)) for _, steps, ends in made_alike(datasets)] == [(2, True)] * 2
    assert [ends for _, _, ends in made_alike([varying.apply(tf.data.experimental.assert_cardinality(2))] * 2)] == [None] * 2


def test_elements_are_repeated_with_their_structure():
    for structure in (lambda x: x, lambda x: (x,), lambda x: (x, x), lambda x: {"a": x}):
        dataset = Dataset.range(2).batch(1).map(structure)
        again = parts.repeated(dataset, 2)
        assert again.element_spec == dataset.element_spec and int(again.cardinality()) == 4
        assert [int(tf.nest.flatten(element)[0][0]) for element in again] == [0, 0, 1, 1]


def test_what_cannot_be_one_job():
    batches = Dataset.range(8).batch(4)
    with pytest.raises(ValueError, match=r"of one kind.*worker 0 has .*int64.* and worker 1 has .*float32"):
        made_alike([batches, batches.map(lambda x: tf.cast(x, tf.float32))])
    same = EndOfData(("worker 0", "worker 1"), 0, (0, 0))
    with pytest.raises(ValueError, match="that of worker 0 has 2 batches and that of worker 1 has 1"):
        parts.as_long_as_others(batches, [parts.description(batches), parts.description(batches.take(1))], same, 1)
    with pytest.raises(ValueError, match=r"must return a `tf.data.Dataset`.*Received: dataset=\[1\]"):
        tfdist.ShardedStrategy(names(1)).distribute_datasets_from_function(lambda context: [1])


@pytest.mark.parametrize(
    ("of_each", "have_next", "short"),
    [
        ((0, 0, 0), (1, 1, 1), None),
        ((0, 0, 0), (0, 0, 0), None),
        ((0, 0, 0), (1, 0, 1), "worker 1, after 4 batches: worker 0 has"),
        ((0, 1, 2), (1, 0, 0), None),
        ((0, 1, 1), (0, 1, 0), "worker 2, after 4 batches: worker 1 has"),
    ],
)
def test_workers_that_read_the_same_end_together(of_each, have_next, short):
    ends = EndOfData(("worker 0", "worker 1", "worker 2"), 0, of_each)
    batches = tf.constant([4 + flag for flag in have_next], tf.int64)

    def check():
        with tf.control_dependencies(ends.checks(tf.constant(have_next, tf.int64), batches)):
            return tf.constant(1)

    if short is None:
        assert int(check()) == int(tf.function(check)()) == 1
        return
    with pytest.raises(RuntimeError, match=f"The data have ended early on {short} another one"):
        check()
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"The data have ended early on {short} another one"):
        tf.function(check)()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("devices", [2, 3])
def test_no_batch_of_one_process_is_left_out(cpus, known, static, devices):
    """Seven batches for two or three devices: with static shapes TensorFlow drops those that do not fill a step."""
    strategy = tfdist.ShardedStrategy(cpus[:devices])

    def own_part(context):
        batches = Dataset.range(14).batch(2, drop_remainder=static)
        return batches if known else batches.filter(lambda _: True)

    distributed = strategy.distribute_datasets_from_function(own_part)
    steps = -(-7 // devices)
    assert int(distributed.cardinality) == (steps if known else UNKNOWN)
    batches = [np.concatenate([part.numpy() for part in strategy.experimental_local_results(b)]) for b in distributed]
    assert len(batches) == steps and np.concatenate(batches).tolist() == list(range(14))


def test_a_distributed_dataset_says_how_many_steps_it_has(cpus):
    strategy = tfdist.ShardedStrategy(cpus[:2])
    assert int(strategy.experimental_distribute_dataset(Dataset.range(10).batch(4)).cardinality) == 3
