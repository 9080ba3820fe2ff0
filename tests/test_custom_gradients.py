"""Gradients of our own: wherever TensorFlow's may be asked for, and without a graph that stays."""

import gc

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import func_graph

from tfdist.custom_gradients import custom_gradient


@custom_gradient
def product(x, y):
    """The gradients are ten times the true ones, so that they are seen to be used."""
    return x * y, lambda upstream: (10 * upstream * y, 10 * upstream * x)


@custom_gradient
def sum_and_difference(x, y):
    return (x + y, x - y), lambda of_sum, of_difference: (of_sum + 3 * of_difference, None)


def gradients_of_product(x, y):
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        z = product(x, y)
    return [z, *tape.gradient(z, [x, y])]


def in_a_branch(x, y):
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        z = tf.cond(x[0] > 0, lambda: product(x, y), lambda: x)
    return [z, *tape.gradient(z, [x, y])]


def in_a_function(x, y):
    called = tf.function(product, autograph=False)
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        z = called(x, y)
    return [z, *tape.gradient(z, [x, y])]


def without_a_tape(x, y):
    z = product(x, y)
    return [z, *tf.gradients(z, [x, y])]


X, Y = tf.constant([2.0, 3.0]), tf.constant([5.0, 7.0])


@pytest.mark.parametrize("way", [gradients_of_product, in_a_branch, in_a_function, without_a_tape])
def test_gradients_of_a_traced_function(way):
    z, of_x, of_y = tf.function(way, autograph=False)(X, Y)
    np.testing.assert_array_equal(z, X * Y)
    np.testing.assert_array_equal(of_x, 10 * Y)
    np.testing.assert_array_equal(of_y, 10 * X)


def test_gradients_of_an_eager_call():
    np.testing.assert_array_equal(gradients_of_product(X, Y), [X * Y, 10 * Y, 10 * X])


@pytest.mark.parametrize("traced", [False, True])
def test_second_gradients(traced):
    def run(x, y):
        with tf.GradientTape() as outer:
            outer.watch(x)
            _, of_x, of_y = gradients_of_product(x, y)
            total = tf.reduce_sum(of_y * of_y)  # (10 x)^2
        return outer.gradient(total, x)

    np.testing.assert_array_equal((tf.function(run, autograph=False) if traced else run)(X, Y), 200 * X)


@pytest.mark.parametrize("traced", [False, True])
def test_several_results_and_an_argument_without_gradient(traced):
    def run(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            total, difference = sum_and_difference(x, y)
            loss = tf.reduce_sum(total) + tf.reduce_sum(difference)
        return total, difference, *tape.gradient(loss, [x, y], unconnected_gradients="zero")

    found = (tf.function(run, autograph=False) if traced else run)(X, Y)
    for one, expected in zip(found, [X + Y, X - Y, [4, 4], [0, 0]], strict=True):
        np.testing.assert_array_equal(one, expected)


def test_no_graph_stays():
    """With `tf.custom_gradient` one stays of every trace."""
    counts = []
    for _ in range(4):
        tf.function(gradients_of_product, autograph=False)(X, Y)
        gc.collect()
        counts.append(sum(isinstance(one, func_graph.FuncGraph) for one in gc.get_objects()))
    assert len(set(counts[1:])) == 1, counts
