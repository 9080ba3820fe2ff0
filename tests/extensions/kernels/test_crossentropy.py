"""tfdist's cross-entropy of integer labels is TensorFlow's, and takes its place inside `strategy.run` on a CPU only."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import local, strategy_on, trace

from tfdist.extensions.kernels.crossentropy import sparse_crossentropy

ROWS, CLASSES = 6, 11


def examples(dtype="float32", rows=ROWS):
    rng = np.random.default_rng(5)
    logits = rng.normal(scale=3.0, size=(rows, CLASSES)).astype(dtype)
    return logits, rng.integers(0, CLASSES, size=rows), rng.normal(size=rows).astype(dtype)


def of_tensorflow(logits, labels):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def derivatives(losses, logits, labels, upstream):
    """Returns the losses, their gradient, and that of the gradient's square."""
    logits, labels = tf.constant(logits), tf.constant(labels)
    with tf.GradientTape() as outer:
        outer.watch(logits)
        with tf.GradientTape() as tape:
            tape.watch(logits)
            values = losses(logits, labels)
        gradient = tape.gradient(values, logits, output_gradients=tf.constant(upstream))
        square = tf.reduce_sum(gradient**2)
    return values, gradient, outer.gradient(square, logits)


@pytest.mark.parametrize("way", [lambda f: f, tf.function], ids=["eager", "traced"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-14)])
def test_values_and_two_gradients(way, dtype, tolerance):
    ours = way(lambda: derivatives(sparse_crossentropy, *examples(dtype)))()
    theirs = way(lambda: derivatives(of_tensorflow, *examples(dtype)))()
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype == reference.dtype
        np.testing.assert_allclose(mine, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", ["huge", "masked", "no rows", "one class", "infinite"])
def test_edges(case):
    """Logits far from 0, classes that are masked out, a batch of nothing, nothing to choose from, and what is not a number."""
    logits, labels, upstream = examples(rows=0 if case == "no rows" else ROWS)
    if case == "huge":
        logits = logits * 1e4 + 1e6
    elif case == "masked":
        logits[:, 4] = -np.inf
        labels[0] = 4  # a loss of infinity
    elif case == "one class":
        logits, labels = logits[:, :1], np.zeros_like(labels)
    elif case == "infinite":
        logits[0, 2] = np.inf
    ours, theirs = (derivatives(losses, logits, labels, upstream)[:2] for losses in (sparse_crossentropy, of_tensorflow))
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.shape == reference.shape
        np.testing.assert_allclose(mine, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_a_label_that_is_out_of_range(label):
    for losses in (sparse_crossentropy, of_tensorflow):
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"{label}.*range|{label} is not in"):
            losses(tf.zeros([1, CLASSES]), tf.constant([label], tf.int64))


# What goes on the ranks, and whether TensorFlow's kernel is replaced: (logits, labels, Keras's loss).
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
IGNORING = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1, reduction=None)
PROBABILITIES = keras.losses.SparseCategoricalCrossentropy(reduction=None)
KERAS = {
    "of rows": ((4, 5), (4,), LOGITS, True),
    "of sequences": ((2, 3, 5), (2, 3), LOGITS, True),
    "labels in a column": ((4, 5), (4, 1), LOGITS, True),
    "with a label that does not count": ((2, 3, 5), (2, 3), IGNORING, True),
    "of probabilities": ((4, 5), (4,), PROBABILITIES, False),
}


@pytest.mark.parametrize("name", KERAS)
def test_what_keras_computes_on_the_ranks(name):
    """Of the whole batch on each: with the reduction None nothing is shared."""
    shape, labels_shape, loss_of, is_replaced = KERAS[name]
    rng = np.random.default_rng(3)
    predictions = rng.uniform(0.1, 1.0, size=shape).astype("float32")
    labels = rng.integers(-1 if loss_of is IGNORING else 0, shape[-1], size=labels_shape)
    strategy = strategy_on(2)
    step = trace(strategy, lambda: loss_of(tf.constant(labels), tf.identity(tf.constant(predictions))))
    for found in local(strategy, step()):
        np.testing.assert_allclose(found, loss_of(labels, predictions), rtol=1e-6, atol=1e-6)
    assert is_replaced != ("SparseSoftmaxCrossEntropyWithLogits" in kinds(step))


def test_the_argument_of_a_softmax_is_keras_affair():
    """Keras takes a softmax's argument for its result, warns if it was told that these are logits, and tfdist lets it."""
    logits = np.random.default_rng(3).normal(size=(4, 5)).astype("float32")
    labels = np.arange(4)
    strategy = strategy_on(2)
    step = trace(strategy, lambda: LOGITS(tf.constant(labels), tf.nn.softmax(tf.constant(logits))))
    with pytest.warns(UserWarning, match="produced by a Softmax"):
        results = local(strategy, step())
    for found in results:
        np.testing.assert_allclose(found, of_tensorflow(logits, labels), rtol=1e-6)


def test_labels_of_a_wrong_shape_are_refused_by_keras():
    strategy = strategy_on(2)
    with pytest.raises(ValueError, match="same shape up until the last dimension"):
        trace(strategy, lambda: keras.ops.sparse_categorical_crossentropy(tf.zeros([3], tf.int64), tf.zeros([4, 5]), True))()


def test_other_strategies_keep_tensorflows_kernel(cpus):
    for strategy in (tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(cpus[:2])):
        step = trace(strategy, lambda: LOGITS(tf.zeros([4], tf.int64), tf.identity(tf.zeros([4, 5]))))
        step()
        assert "SparseSoftmaxCrossEntropyWithLogits" in kinds(step)


def kinds(step):
    return {operation.type for operation in step.get_concrete_function().graph.get_operations()}
