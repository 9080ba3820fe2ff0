"""GELU on the ranks: Keras's values, its gradients, and one tensor kept for them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import in_a_rank, local, strategy_on, trace

WAYS = pytest.mark.parametrize("approximate", [False, True], ids=["exact", "tanh"])


def values_and_gradients(x, approximate):
    """Returns GELU, its gradient and that of the gradient's square."""
    x = tf.constant(x)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = keras.activations.gelu(x, approximate=approximate)
        gradient = tape.gradient(y, x, output_gradients=tf.cos(x))
        square = tf.reduce_sum(gradient**2)
    return y, gradient, outer.gradient(square, x)


@WAYS
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5), ("float16", 1e-2)])
def test_it_is_keras_gelu(approximate, dtype, tolerance):
    x = np.concatenate([np.linspace(-9, 9, 333), [0.0, -40.0, 40.0]]).astype(dtype)
    expected = [tensor.numpy() for tensor in values_and_gradients(x, approximate)]
    strategy = strategy_on(2)
    for found in local(strategy, trace(strategy, lambda: values_and_gradients(x, approximate))()):
        if dtype == "float32" and not approximate:
            # |x| / 2 times that of 1, and that of the result.
            rounding = np.finfo("float32").eps * (np.abs(x) + 2 * np.abs(expected[0]))
            assert np.all(np.abs(found[0] - expected[0]) <= rounding)
        else:
            np.testing.assert_array_equal(found[0], expected[0])
        for mine, reference in zip(found[1:], expected[1:], strict=True):
            assert mine.dtype == reference.dtype
            np.testing.assert_allclose(mine, reference, rtol=tolerance, atol=tolerance)


def kept(approximate):
    """Returns how many tensors of the input's size backward takes from forward."""
    shape = (3, 5)
    x = tf.reshape(tf.range(15.0), shape)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = keras.activations.gelu(x, approximate=approximate)
    backward = tf.function(lambda upstream: tape.gradient(y, x, output_gradients=upstream))
    captured = backward.get_concrete_function(tf.ones(shape)).graph.external_captures
    return len({id(tensor) for tensor in captured if tensor.shape == shape})


@WAYS
def test_what_is_kept(approximate):
    assert in_a_rank(lambda: kept(approximate)) == 1
    assert kept(approximate) >= 3  # in TensorFlow
