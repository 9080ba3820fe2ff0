"""Global batches cut in the pieces of a worker's devices."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import split_batches

Dataset = tf.data.Dataset
Pair = collections.namedtuple("Pair", ["features", "label"])

# (rows, parts): divisible, odd, fewer rows than parts, none at all, nothing to cut.
CUTS = [(8, 4), (10, 4), (33, 4), (65, 3), (7, 2), (3, 4), (1, 3), (0, 2), (5, 1)]


def numpy_of(element):
    """The element with dense numpy arrays as leaves."""

    def convert(leaf):
        if leaf is None:
            return None
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.to_list()
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.to_dense(leaf).numpy()
        return leaf.numpy()

    return tf.nest.map_structure(convert, element)


def pieces_of(dataset, num_parts, parts):
    return [numpy_of(element) for element in split_batches(dataset, num_parts, parts)]


def joined(pieces):
    """The rows of dense `pieces`, one after the other; checks that all have one structure."""
    for piece in pieces[1:]:
        tf.nest.assert_same_structure(pieces[0], piece)
    return tf.nest.map_structure(lambda *leaves: None if leaves[0] is None else np.concatenate(leaves), *pieces)


def assert_same(mine, theirs):
    tf.nest.assert_same_structure(mine, theirs)
    for own, other in zip(tf.nest.flatten(mine), tf.nest.flatten(theirs), strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("rows, num_parts", CUTS)
def test_the_cuts_are_those_of_numpy(rows, num_parts):
    batch = np.arange(rows * 3).reshape(rows, 3)
    expected = np.array_split(batch, num_parts)
    dataset = Dataset.from_tensors(batch)
    got = pieces_of(dataset, num_parts, range(num_parts))
    assert [piece.shape for piece in got] == [piece.shape for piece in expected]
    for part in range(num_parts):
        np.testing.assert_array_equal(got[part], expected[part])
        (alone,) = pieces_of(dataset, num_parts, [part])
        np.testing.assert_array_equal(alone, expected[part])
    sizes = [len(piece) for piece in got]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def pipeline(drop_remainder=False):
    """Shuffled by the global seed alone, with a drawn noise and a partial last batch: 33 = 3 x 10 + 3."""
    tf.random.set_seed(7)
    dataset = Dataset.range(33).shuffle(20)
    dataset = dataset.map(lambda index: {"index": index, "noise": tf.random.uniform([2]), "text": tf.strings.as_string(index)})
    return dataset.batch(10, drop_remainder=drop_remainder).map(lambda x: (x, x["index"] % 2 == 0, None))


@pytest.mark.parametrize("workers", [((0,), (1,)), ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (2,), (3, 4))])
def test_the_pieces_of_all_workers_are_the_batches_of_one_process(workers):
    """Each worker builds the pipeline for itself; shuffling and noise must come out the same, epoch after epoch."""
    num_parts = sum(map(len, workers))
    one = pipeline()
    split = [split_batches(pipeline(), num_parts, parts) for parts in workers]
    epochs = []
    for _ in range(2):
        expected = [numpy_of(batch) for batch in one]
        received = [[numpy_of(element) for element in dataset] for dataset in split]
        assert [len(elements) for elements in received] == [len(parts) * len(expected) for parts in workers]
        for number, batch in enumerate(expected):
            pieces = []
            for parts, elements in zip(workers, received, strict=True):
                pieces += elements[number * len(parts) : (number + 1) * len(parts)]
            assert_same(joined(pieces), batch)
        epochs.append(np.concatenate([batch[0]["index"] for batch in expected]).tolist())
    assert len(expected[-1][1]) == 3  # the partial batch
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(33))
    assert epochs[0] != epochs[1]  # else the shuffle had nothing to get wrong


def test_a_part_may_be_repeated():
    """As for the tensor- and pipeline-parallel ranks of one data index."""
    got = pieces_of(Dataset.range(6).batch(6), 2, (1, 1, 0, 0))
    assert [piece.tolist() for piece in got] == [[3, 4, 5], [3, 4, 5], [0, 1, 2], [0, 1, 2]]


STRUCTURES = {
    "one tensor": lambda x: x,
    "tuple of one": lambda x: (x,),
    "tuple": lambda x: (x, x + 1, x + 2),
    "none": lambda x: (x, None),
    "dict": lambda x: {"b": x, "a": x + 1},
    "namedtuple": lambda x: Pair(x, x + 1),
    "nested": lambda x: ({"a": x, "pair": Pair(x, (None, x + 1))}, x),
    "dtypes": lambda x: (x > 2, tf.cast(x, tf.int8), tf.strings.as_string(x), tf.cast(x, tf.bfloat16), tf.cast(x, tf.complex64)),
}


@pytest.mark.parametrize("parts", [(0,), (2,), (0, 1, 2), (1, 2)])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures(structure, parts):
    dataset = Dataset.range(10).batch(5).map(STRUCTURES[structure])
    split = split_batches(dataset, 3, parts)
    assert split.element_spec == dataset.element_spec
    assert type(split.element_spec) is type(dataset.element_spec)
    everything = pieces_of(dataset, 3, range(3))
    for number, batch in enumerate(dataset):
        assert_same(joined(everything[number * 3 : number * 3 + 3]), numpy_of(batch))
    wanted = [everything[number * 3 + part] for number in range(2) for part in parts]
    for mine, theirs in zip(map(numpy_of, split), wanted, strict=True):
        assert_same(mine, theirs)


SHAPES = [
    # (dataset, parts, static rows of a piece)
    (lambda: Dataset.range(24).batch(8, drop_remainder=True), 4, 2),
    (lambda: Dataset.range(24).batch(8, drop_remainder=True), 1, 8),
    (lambda: Dataset.range(24).batch(8), 4, None),
    (lambda: Dataset.range(24).batch(10, drop_remainder=True), 4, None),
    (lambda: Dataset.range(24).batch(3, drop_remainder=True), 4, None),
    (lambda: Dataset.from_tensors(np.zeros((6, 2))), 3, 2),
]


@pytest.mark.parametrize("build, num_parts, rows", SHAPES)
def test_static_shapes(build, num_parts, rows):
    """The same for every worker, also where its own pieces of an uneven cut happen to be of one size."""
    dataset = build()
    tail = dataset.element_spec.shape[1:]
    for parts in [(0,), (num_parts - 1,), range(num_parts)]:
        assert split_batches(dataset, num_parts, parts).element_spec.shape == tf.TensorShape([rows]).concatenate(tail)


def test_one_known_size_is_enough():
    dataset = Dataset.from_tensors((np.zeros((6, 2)), np.zeros(6)))
    dataset = dataset.map(lambda x, y: (x, tf.compat.v1.placeholder_with_default(y, [None])))
    assert dataset.element_spec[1].shape == [None]
    assert [spec.shape for spec in split_batches(dataset, 3, (0, 1)).element_spec] == [[2, 2], [2]]


def test_unknown_rank():
    def forget(x):
        return tf.compat.v1.placeholder_with_default(x, None)

    assert [piece.tolist() for piece in pieces_of(Dataset.range(5).batch(5).map(forget), 2, (0, 1))] == [[0, 1, 2], [3, 4]]
    with pytest.raises(tf.errors.InvalidArgumentError, match="not scalars"):
        pieces_of(Dataset.range(5).map(forget), 2, (0, 1))


@pytest.mark.parametrize("parts", [(1,), (0, 1, 2)])
def test_ragged(parts):
    tokens = tf.RaggedTensor.from_row_lengths(tf.range(21), [0, 3, 1, 5, 2, 4, 6])
    dataset = Dataset.from_tensor_slices((tokens, tf.range(7))).batch(6)  # then a batch of 1 for 3 parts
    got = pieces_of(dataset, 3, range(3))
    for number, (batch, _) in enumerate(dataset):
        assert sum((piece for piece, _ in got[number * 3 : number * 3 + 3]), []) == batch.to_list()
    wanted = [got[number * 3 + part][0] for number in range(2) for part in parts]
    assert [piece for piece, _ in pieces_of(dataset, 3, parts)] == wanted
    even = Dataset.from_tensor_slices(tokens).batch(6, drop_remainder=True)
    assert split_batches(even, 3, parts).element_spec.shape.as_list() == [2, None]
    assert split_batches(even, 4, parts).element_spec.shape.as_list() == [None, None]


@pytest.mark.parametrize("parts", [(1,), (0, 1, 2)])
def test_sparse(parts):
    full = np.arange(7 * 5).reshape(7, 5) % 4
    dataset = Dataset.from_tensor_slices((tf.sparse.from_dense(full), full)).batch(6)
    for sparse, dense in pieces_of(dataset, 3, parts):
        np.testing.assert_array_equal(sparse, dense)
    even = dataset.take(1).map(lambda x, _: x).unbatch().batch(6, drop_remainder=True)
    assert split_batches(even, 3, parts).element_spec == tf.SparseTensorSpec([2, 5], tf.int64)
    assert split_batches(even, 4, parts).element_spec == tf.SparseTensorSpec([None, 5], tf.int64)


@pytest.mark.parametrize("parts", [(1,), (0, 1, 2)])
def test_cardinality(parts):
    batches = Dataset.range(10).batch(4)
    assert int(split_batches(batches, 3, parts).cardinality()) == 3 * len(parts)
    assert len(pieces_of(batches, 3, parts)) == 3 * len(parts)
    assert int(split_batches(batches.take(0), 3, parts).cardinality()) == 0
    assert pieces_of(batches.take(0), 3, parts) == []
    assert int(split_batches(batches.repeat(), 3, parts).cardinality()) == tf.data.INFINITE_CARDINALITY
    assert len(list(split_batches(batches.repeat(), 3, parts).take(50))) == 50
    unknown = batches.filter(lambda _: True)
    assert int(split_batches(unknown, 3, parts).cardinality()) == tf.data.UNKNOWN_CARDINALITY
    assert len(pieces_of(unknown, 3, parts)) == 3 * len(parts)


@pytest.mark.parametrize("num_parts, parts", [(1, (0,)), (3, (1,)), (3, (0, 1, 2))])
def test_options_are_kept(num_parts, parts):
    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = 3
    options.autotune.ram_budget = 12345
    dataset = Dataset.range(10).with_options(options).batch(5)
    kept = split_batches(dataset, num_parts, parts).options()
    assert kept.deterministic is True
    assert kept.threading.private_threadpool_size == 3
    assert kept.autotune.ram_budget == 12345


def test_the_cut_draws_nothing_from_the_global_seed():
    def draw(cut):
        tf.random.set_seed(3)
        dataset = Dataset.range(8).batch(4)
        if cut:
            split_batches(dataset, 3, (0, 1))
            split_batches(dataset, 3, (2,))
        return tf.random.uniform([]).numpy()

    assert draw(True) == draw(False)


@pytest.mark.parametrize("parts", [(0,), (0, 1)])
def test_tensors_that_disagree_while_running(parts):
    """By mistake: where neither a generator nor two datasets of batches make them."""
    dataset = Dataset.range(8).batch(4).map(lambda x: (x, x[: 8 - x[3]]))  # 4 and 4 rows, then 4 and 1
    elements = iter(split_batches(dataset, 2, parts))
    for _ in parts:
        next(elements)
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows. Tensor 1 .* another number than tensor 0"):
        next(elements)


def zipped(*sizes, drop_remainder=False):
    """Datasets of the same number of batches, zipped: 26 batches of each size, the last one of another size."""
    total = [25 * size + rest for size, rest in sizes]
    batched = [Dataset.range(n).batch(size, drop_remainder) for n, (size, _) in zip(total, sizes, strict=True)]
    return Dataset.zip(tuple(batched))


def generated(*rows):
    signature = tuple(tf.TensorSpec([None], tf.int64) for _ in rows)
    return Dataset.from_generator(lambda: iter([tuple(np.arange(n) for n in rows)]), output_signature=signature)


DIFFERENT = [
    # (dataset, devices, rows that each gets of each tensor of the first batch, of the last one)
    (lambda: zipped((6, 4), (18, 12)), 2, [(3, 9), (3, 9)], [(2, 6), (2, 6)]),
    (lambda: zipped((20, 5), (5, 4)), 2, [(12, 3), (8, 2)], [(5, 4), (0, 0)]),
    (lambda: zipped((8, 8), (12, 12)), 3, [(4, 6), (2, 3), (2, 3)], [(4, 6), (2, 3), (2, 3)]),
    (lambda: zipped((8, 8), (12, 12), drop_remainder=True), 2, [(4, 6), (4, 6)], [(4, 6), (4, 6)]),
    (lambda: zipped((8, 8), (12, 12), drop_remainder=True), 3, [(4, 6), (2, 3), (2, 3)], [(4, 6), (2, 3), (2, 3)]),
    (lambda: generated(10, 0, 5), 2, [(6, 0, 3), (4, 0, 2)], [(6, 0, 3), (4, 0, 2)]),
]


@pytest.mark.filterwarnings("ignore:The parts of a batch")
@pytest.mark.parametrize(("build", "num_parts", "first", "last"), DIFFERENT)
def test_every_device_gets_the_same_share_of_each_tensor(build, num_parts, first, last):
    pieces = pieces_of(build(), num_parts, range(num_parts))
    assert [tuple(map(len, piece)) for piece in pieces[:num_parts]] == first
    assert [tuple(map(len, piece)) for piece in pieces[-num_parts:]] == last
    batches = [numpy_of(batch) for batch in build()]
    assert len(pieces) == num_parts * len(batches)
    for number, batch in enumerate(batches):
        assert_same(joined(pieces[number * num_parts : (number + 1) * num_parts]), batch)


def test_static_shapes_of_tensors_that_differ():
    spec = split_batches(zipped((8, 0), (12, 0), drop_remainder=True), 2, (0,)).element_spec
    assert [of_one.shape for of_one in spec] == [[4], [6]]
    spec = split_batches(zipped((8, 0), (12, 0), drop_remainder=True), 3, (0,)).element_spec
    assert [of_one.shape for of_one in spec] == [[None], [None]]


def test_idle_devices_are_told_once():
    with pytest.warns(UserWarning, match="The parts of a batch have 8, 6 rows, .*: 2 of 7 devices get any") as told:
        pieces_of(Dataset.zip((Dataset.range(16).batch(8), Dataset.range(12).batch(6))), 7, (0, 1))
    assert len(told) == 1
    with pytest.warns(UserWarning, match="Choose batch sizes whose greatest common divisor is a multiple of 3"):
        split_batches(zipped((8, 0), (12, 0), (6, 0), drop_remainder=True), 3, (0,))


def test_refusals():
    batches = Dataset.range(8).batch(4)
    with pytest.raises(ValueError, match=r"`dataset` must be a `tf.data.Dataset`.*Received: dataset=\[1\]"):
        split_batches([1], 2, (0,))
    for num_parts in (0, -1, 2.0, True, None):
        with pytest.raises(ValueError, match="`num_parts` must be a positive integer"):
            split_batches(batches, num_parts, (0,))
    for parts in ((), (2,), (-1, 0), (0.0,)):
        with pytest.raises(ValueError, match=r"`parts` must name at least one piece, each an integer in \[0, 2\)"):
            split_batches(batches, 2, parts)
    for scalars in (Dataset.range(8), Dataset.zip((batches, Dataset.range(8)))):
        for num_parts in (1, 2):
            with pytest.raises(ValueError, match=r"global batches.*Received: element_spec=.*dataset.batch\(global_batch_size\)"):
                split_batches(scalars, num_parts, (0,))
    with pytest.raises(NotImplementedError, match="a DatasetSpec has no rows to split"):
        split_batches(Dataset.range(8).window(4), 2, (0,))
    with pytest.raises(NotImplementedError, match="a OptionalSpec has no rows to split"):
        split_batches(batches.map(tf.experimental.Optional.from_value), 2, (0,))
