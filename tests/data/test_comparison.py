"""Digests of batches that Python code makes: what workers compare, beside reading the same elements as before."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import comparison
from tfdist.data.comparison import compared, is_same
from tfdist.data.signature import runs_python

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(60)]


def digests(dataset, batches=None, iterations=1):
    """Returns what is told while `dataset` is read so often: digests by iteration and batch."""
    told = {}
    made = compared(dataset, lambda iteration, batch, digest: told.update({(iteration, batch): digest}))
    for _ in range(iterations):
        for _ in made if batches is None else made.take(batches):
            pass
    return json.loads(json.dumps(list(told.items())))


def of(*arrays):
    """Returns the digest of one batch."""
    ((_, digest),) = digests(tf.data.Dataset.from_tensors(arrays))
    return digest


def test_few_batches_of_each_iteration_are_told():
    data = tf.data.Dataset.range(11).batch(1)
    assert [at for at, _ in digests(data, iterations=2)] == [[i, b] for i in (0, 1) for b in (0, 1, 2, 4, 8)]


def test_two_iterators_at_once():
    told = []
    made = compared(tf.data.Dataset.range(5).batch(1), lambda *at: told.append(at[:2]))
    for _ in zip(made, made, strict=True):
        pass
    assert sorted(told) == [(i, b) for i in (0, 1) for b in (0, 1, 2, 4)]


NORMAL = np.random.default_rng(1).normal(size=(33, 65)).astype("float32")


@pytest.mark.parametrize(
    "other",
    [
        np.random.default_rng(2).normal(size=(33, 65)).astype("float32"),
        NORMAL[::-1],
        NORMAL[:32],
        NORMAL * np.float32(1.01),
    ],
    ids=["drawn", "reordered", "a row less", "scaled"],
)
def test_other_batches_have_other_digests(other):
    assert not is_same(of(NORMAL), of(other))
    assert not is_same(of(np.arange(33), NORMAL), of(np.arange(33), other))


def test_rounding_makes_no_other_digest():
    noise = np.random.default_rng(3).normal(size=NORMAL.shape).astype("float32")
    assert is_same(of(NORMAL), of(NORMAL * (1 + 1e-6 * noise)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.arange(7), np.arange(7) + np.eye(7, dtype=int)[3]),
        (np.array([True, False, True]), np.array([True, True, True])),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        (np.ones([3], "complex64"), np.zeros([3], "complex64")),
        (np.zeros([0, 3], "float32"), np.zeros([1, 3], "float32")),
    ],
    ids=["integers", "booleans", "strings", "complex", "empty"],
)
def test_every_dtype(one, other):
    assert is_same(of(one), of(one)) and not is_same(of(one), of(other))


def test_not_a_number_is_as_itself():
    values = np.where(np.arange(9) % 4 == 0, [np.nan, np.inf, 1] * 3, 2.0)
    assert is_same(of(values), of(values)) and not is_same(of(values), of(values[::-1]))


def test_elements_and_length_stay():
    """Of every structure, also where nothing can be compared."""
    ragged = tf.ragged.constant([[1, 2], [3]])
    sparse = tf.sparse.from_dense([[0, 1], [2, 0]])
    element = {"dense": tf.ones([2, 3]), "ragged": ragged, "parts": (sparse, tf.constant(["a", "b"]))}
    data = tf.data.Dataset.from_tensors(element).repeat(3)
    made = compared(data, lambda *_: None)
    assert made.element_spec == data.element_spec and int(made.cardinality()) == 3
    (found, *_) = made
    tf.nest.map_structure(lambda a, b: np.testing.assert_array_equal(*map(_plain, (a, b))), found, element)
    assert int(compared(data.repeat(), lambda *_: None).cardinality()) == tf.data.INFINITE_CARDINALITY
    assert next(iter(compared(data.repeat(), lambda *_: None)))["dense"].shape == (2, 3)
    unknown = data.filter(lambda _: True)
    assert int(compared(unknown, lambda *_: None).cardinality()) == tf.data.UNKNOWN_CARDINALITY


def _plain(value):
    return tf.sparse.to_dense(value) if isinstance(value, tf.SparseTensor) else getattr(value, "flat_values", value)


def test_which_data_run_python_code():
    rows = tf.data.Dataset.range(3)
    generated = tf.data.Dataset.from_generator(lambda: range(3), output_signature=tf.TensorSpec([], tf.int64))
    drawn = rows.map(lambda x: tf.py_function(lambda: np.random.normal(), [], tf.float32))
    for data in (generated, drawn, generated.shuffle(3, seed=1).batch(2).prefetch(1), tf.data.Dataset.zip((rows, drawn))):
        assert runs_python(data)
    assert not runs_python(rows.map(lambda x: x + 1).shuffle(3).batch(2))


def test_words():
    words = comparison.difference(4, "worker 0 (a:1)", "worker 1 (b:1)")
    assert words.startswith("Workers read different data: batch 4 of a dataset that runs Python code is another one on worker 1")
