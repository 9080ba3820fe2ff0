"""Programs of several operations, as TensorFlow and Keras put them together: their placements, and that they are so."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.placements.keras_programs import Facts, traced
from tests.placements.test_rules import SETTINGS
from tests.placements.worlds import World
from tfdist.placements.kinds import How, Lengths, Partial, Replicate, Shard, Unknown, Why

WIDTH = 3
TABLE = tf.Variable(np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3))
WORDS = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1], [5, 7], key_dtype="int32", value_dtype="int32"), -1)
DRAW = tf.random.Generator.from_seed(3)


def labels(x):
    return tf.cast(x[:, 0] * WIDTH, "int32")


def loop(x):
    parts = tf.TensorArray(x.dtype, size=WIDTH, element_shape=(None,))
    _, parts = tf.while_loop(lambda i, _: i < WIDTH, lambda i, ta: (i + 1, ta.write(i, x[:, i] * 2)), (0, parts))
    return parts.stack()


def unstacked(x):
    return tf.TensorArray(x.dtype, size=WIDTH).unstack(tf.transpose(x)).gather([2, 0])


def pushed(x):
    handle = tf.raw_ops.EmptyTensorList(element_shape=[-1], max_num_elements=4, element_dtype="float32")
    handle = tf.raw_ops.TensorListPushBack(input_handle=handle, tensor=x[:, 0])
    _, last = tf.raw_ops.TensorListPopBack(input_handle=handle, element_shape=[-1], element_dtype="float32")
    return last


def joined_in_lists(x):
    handle = tf.raw_ops.TensorListFromTensor(tensor=tf.transpose(x)[..., None], element_shape=[-1, 1])
    return tf.raw_ops.TensorListStack(input_handle=handle, element_shape=[-1, 1], element_dtype="float32")


def ordered(x):
    """As `tf.recompute_grad` lets what it computes again wait for what has come back."""
    is_there = tf.cast(tf.reduce_max(tf.reshape(x, [-1])[:1]), "bool")
    return x + tf.where(is_there == is_there, 0.0, float("nan"))


def matching(x, y):
    """Halves of what was computed of two batches at once."""
    both = keras.ops.tanh(tf.concat([x, y], 0))
    n = tf.shape(x)[0]
    return both[:n] * both[n:]


def matching_deep(x, y):
    both = tf.einsum("bd,de->be", tf.concat([x, y], 0), TABLE[:3])
    one, other = tf.split(both, [tf.shape(x)[0], tf.shape(y)[0]])
    return tf.reduce_sum(one * other, -1)


def merged(x, y):
    both = tf.concat([x, y], 0)
    deep = tf.reshape(tf.tile(both[:, None], [1, 2, 1]), [-1, WIDTH]) @ TABLE[:3]
    return tf.reshape(deep, [tf.shape(both)[0], 2, WIDTH])[: tf.shape(x)[0]]


def masked(x):
    return tf.boolean_mask(x, x[:, 0] > 0.4)


def masked_flat(x):
    return tf.reduce_sum(tf.boolean_mask(x, x > 0.4))


X, XY = ("x",), ("x", "y")
PROGRAMS = {
    "rows @ weights": (lambda x: tf.matmul(x, TABLE[:3]), Shard(0, X)),
    "tensordot": (lambda x: tf.tensordot(x[:, None], TABLE[:3], 1), Shard(0, X)),
    "chosen class": (lambda x: tf.gather_nd(x, tf.stack([tf.range(tf.shape(x)[0]), labels(x)], 1)), Shard(0, X)),
    "chosen class of each": (lambda x: tf.gather(x, labels(x), batch_dims=1), Shard(0, X)),
    "looked up": (lambda x: tf.nn.embedding_lookup(TABLE, labels(x)), Shard(0, X)),
    "looked up in two axes": (lambda x: tf.gather_nd(TABLE, tf.stack([labels(x), labels(x)], 1)), Shard(0, X)),
    "words": (lambda x: WORDS.lookup(labels(x)), Shard(0, X)),
    "loop": (loop, Shard(1, X)),
    "unstacked": (unstacked, Shard(1, X)),
    "pushed": (pushed, Shard(0, X)),
    "list of columns": (joined_in_lists, Shard(1, X)),
    "mask": (masked, Shard(0, X, False, None)),
    "sum of masked": (masked_flat, Partial(How.SUM)),
    "mean of masked": (lambda x: tf.reduce_mean(masked(x)), Why.SOME_ROWS),
    "number of masked": (lambda x: tf.shape(masked(x))[0], Partial(How.SUM)),
    "shape of masked": (lambda x: tf.shape(masked(x)), Lengths(0, X, False, None)),
    "zeros of masked": (lambda x: tf.zeros(tf.shape(masked(x))), Shard(0, X, False, None)),
    "zeros": (lambda x: tf.zeros((tf.shape(x)[0], 4)), Shard(0, X)),
    "repeated": (lambda x: tf.repeat(x, 2, axis=0), Shard(0, X, True, 2)),
    "repeated within": (lambda x: tf.repeat(x, 2, axis=1), Shard(0, X)),
    "softmax over an inner axis": (lambda x: tf.nn.softmax(tf.reshape(x, (-1, 3, 1)), axis=1), Shard(0, X)),
    "softmax over rows": (lambda x: tf.nn.softmax(x, axis=0), Why.MEET),
    "mean": (tf.reduce_mean, Partial(How.MEAN)),
    "sum by number": (lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], "float32"), Partial(How.MEAN)),
    "mean times number": (lambda x: tf.reduce_mean(x) * tf.cast(tf.size(x), "float32"), Partial(How.SUM)),
    "mean of means": (lambda x: tf.reduce_mean(tf.stack([tf.reduce_mean(x[:, 0]), tf.reduce_mean(x)])), Partial(How.MEAN)),
    "mean and a penalty": (lambda x: tf.reduce_mean(x) + 0.1 * tf.nn.l2_loss(TABLE), Partial(How.MEAN)),
    "sum and a penalty": (lambda x: tf.reduce_sum(x) + 0.1 * tf.nn.l2_loss(TABLE), Why.MIXED),
    "branch on a mean": (lambda x: tf.where(tf.reduce_mean(x) < 1.5, 0.1, 3.0), Why.FUNCTION),
    "curved mean": (lambda x: tf.math.lgamma(tf.reduce_mean(x)), Why.FUNCTION),
    "centred": (lambda x: x - tf.reduce_mean(x, 0), Why.GOES_BACK),
    "normalized by the number": (lambda x: x / tf.cast(tf.shape(x)[0], "float32"), Why.GOES_BACK),
    "any": (lambda x: tf.reduce_any(x > 0.5), Partial(How.MAX)),
    "none": (lambda x: tf.logical_not(tf.reduce_any(x > 0.5)), Partial(How.MIN)),
    "covariance": (lambda x: tf.matmul(x, x, transpose_a=True), Partial(How.SUM)),
    "all pairs": (lambda x: tf.matmul(x, x, transpose_b=True), Why.MEET),
    "all pairs, element by element": (lambda x: x[:, None] - x[None], Why.MEET),
    "a column against a row": (lambda x: x[:, :1] - x[:, 0], Why.MEET),
    "differences": (lambda x: x[1:] - x[:-1], Why.MEET),
    "first rows": (lambda x: x[:2], Why.MEET),
    "in reverse": (lambda x: x[::-1], Why.MEET),
    "running sum": (lambda x: tf.cumsum(x), Why.MEET),
    "number of each row": (lambda x: x * tf.cast(tf.range(tf.shape(x)[0]), "float32")[:, None], Why.MEET),
    "shuffled": (lambda x: tf.random.shuffle(x), Why.MEET),
    "histogram": (lambda x: tf.raw_ops.DenseBincount(input=labels(x), size=4, weights=[]), Partial(How.SUM)),
    "histogram up to the greatest": (lambda x: tf.math.bincount(labels(x)), Why.SIZE),
    "sums by class": (lambda x: tf.math.unsorted_segment_sum(x, labels(x), 4), Partial(How.SUM)),
    "confusion": (lambda x: tf.math.confusion_matrix(labels(x), labels(x), 4), None),
    "ordered": (ordered, Shard(0, X)),
    "batched product": (lambda x: tf.matmul(tf.reshape(x, (-1, 3, 1)), tf.reshape(x, (-1, 1, 3))), Shard(0, X)),
    "of words": (lambda x: tf.strings.length(tf.strings.join([tf.as_string(x), "a"])), Shard(0, X)),
    "two batches": (matching, Shard(0, X), XY),
    "two batches, split": (matching_deep, Shard(0, X), XY),
    "two batches, in pieces": (merged, Shard(0, X), XY),
    "mean of two batches": (lambda x, y: tf.reduce_mean(tf.concat([x, y], 0)), Partial(How.MEAN), XY),
    "two batches, one turned": (lambda x, y: tf.concat([x, y], 0) - tf.concat([y, x], 0), Why.MEET, XY),
    "rows of two batches": (lambda x, y: x + y, Shard(0, X), XY),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_what_its_placement_says(name):
    function, expected, names = (*PROGRAMS[name], X)[:3]
    graph = traced(function, *[(WIDTH,)] * len(names))
    rename = {x.name: name for x, name in zip(graph.inputs, names, strict=False)}
    found = renamed(Facts(graph).of(graph.outputs[0]), rename)
    if isinstance(expected, Why):
        assert isinstance(found, Unknown) and found.why is expected, found
        return
    assert expected is None or found == expected

    @SETTINGS
    @given(st.data())
    def check(data):
        world = Batch(data)
        inputs = [world.shard(WIDTH, rows=("a",)) for _ in names]
        parts = [np.asarray(function(*(tf.constant(x.parts[rank]) for x in inputs))) for rank in range(len(world.rows))]
        whole = np.asarray(function(*(tf.constant(x.whole) for x in inputs)))
        if not isinstance(found, Unknown):
            world.check(found, parts, whole)

    check()


class Batch(World):
    """A world in which all tensors of the batch have the same number of rows."""

    def count(self, rank, names):
        return self.rows[rank] * max(len(names), 1)


def renamed(placement, names):
    rows = tuple(names.get(name, name) for name in getattr(placement, "rows", ()))
    return type(placement)(**{**vars(placement), "rows": rows}) if rows else placement


@pytest.mark.parametrize("rows", [None, 6])
@pytest.mark.parametrize("shape", [(4,), ()])
def test_each_rank_draws_for_its_own_rows(rows, shape):
    def noise(x):
        return [
            x + tf.random.normal(tf.shape(x)),
            x + tf.random.stateless_uniform(tf.shape(x), seed=[1, 2]),
            x + DRAW.normal(tf.shape(x)),
            tf.random.normal((3,)),
        ]

    graph = traced(noise, shape, rows=rows)
    *of_rows, of_none = [Facts(graph).of(x) for x in graph.outputs]
    assert of_rows == [Shard(0, (graph.inputs[0].name,))] * 3
    assert of_none == Replicate(is_drawn=True)
