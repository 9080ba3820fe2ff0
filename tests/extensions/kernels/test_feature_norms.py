"""Layer and RMS normalization on the ranks: Keras's values and gradients, one tensor kept, and what is left to Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import in_a_rank, local, strategy_on, trace

SHAPE = (3, 5, 7)


def layer_norm(x, gamma=None, beta=None, axis=-1):
    return keras.ops.layer_normalization(x, gamma, beta, axis=axis, epsilon=1e-3)


def rms_norm(x, scale=None, axis=-1):
    return keras.ops.rms_normalization(x, scale, axis=axis, epsilon=1e-3)


NORMS = pytest.mark.parametrize(
    ("norm", "parameters"), [(layer_norm, 0), (layer_norm, 1), (layer_norm, 2), (rms_norm, 0), (rms_norm, 1)]
)


def arrays(dtype, parameters):
    rng = np.random.default_rng(5)
    return [rng.normal(1, 2, shape).astype(dtype) for shape in [SHAPE, *[SHAPE[-1:]] * parameters]]


def values_and_gradients(norm, inputs):
    """Returns the norm, its gradients and those of the gradients' squares."""
    inputs = [tf.constant(x) for x in inputs]
    with tf.GradientTape() as outer:
        outer.watch(inputs)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = norm(*inputs)
        gradients = tape.gradient(y, inputs, output_gradients=tf.cos(inputs[0]))
        square = tf.add_n([tf.reduce_sum(gradient**2) for gradient in gradients])
    return [y, *gradients, outer.gradient(square, inputs[0])]


@NORMS
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-6), ("float16", 2e-2)])
def test_it_is_keras_norm(norm, parameters, dtype, tolerance):
    inputs = arrays(dtype, parameters)
    expected = [tensor.numpy() for tensor in values_and_gradients(norm, inputs)]
    strategy = strategy_on(2)
    for found in local(strategy, trace(strategy, lambda: values_and_gradients(norm, inputs))()):
        for mine, reference in zip(found, expected, strict=True):
            assert mine.dtype == reference.dtype
            np.testing.assert_allclose(mine, reference, rtol=tolerance, atol=tolerance * np.abs(reference).max())


def kept(norm, inputs):
    """Returns how many tensors of the input's size backward takes from forward."""
    inputs = [tf.constant(x) for x in inputs]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = norm(*[x + 1 for x in inputs])
    backward = tf.function(lambda upstream: tape.gradient(y, inputs, output_gradients=upstream))
    captured = backward.get_concrete_function(tf.ones(SHAPE)).graph.external_captures
    return len({id(tensor) for tensor in captured if tensor.shape == SHAPE})


@NORMS
def test_what_is_kept(norm, parameters):
    inputs = arrays("float32", parameters)
    assert in_a_rank(lambda: kept(norm, inputs)) == 1
    assert kept(norm, inputs) >= 1 + (parameters > 0)  # in Keras


@pytest.mark.parametrize(("axis", "shape"), [(1, (5,)), ((1, 2), (5, 7)), (-1, (1, 7))])
@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_what_is_left_to_keras(norm, axis, shape):
    """Other axes, and parameters that are broadcast: the same operations as without a strategy."""
    x, gamma = np.ones(SHAPE, "float32"), np.ones(shape, "float32")
    if norm is rms_norm and axis != -1:
        gamma = None

    def operations():
        @tf.function
        def call(x):
            return norm(x, gamma, axis=axis)

        return [operation.type for operation in call.get_concrete_function(tf.constant(x)).graph.get_operations()]

    assert in_a_rank(operations) == operations()


def test_an_empty_batch_has_gradients_of_zero():
    def gradients():
        x, gamma, beta = tf.zeros((0, 4, 7)), tf.ones(7), tf.zeros(7)
        with tf.GradientTape() as tape:
            tape.watch([x, gamma, beta])
            y = layer_norm(x, gamma, beta)
        return tape.gradient(y, [x, gamma, beta])

    strategy = strategy_on(2)
    for of_x, *of_parameters in local(strategy, trace(strategy, gradients)()):
        assert of_x.shape == (0, 4, 7)
        np.testing.assert_array_equal(of_parameters, np.zeros((2, 7)))


def test_the_input_gradient_that_no_tape_follows_can_be_asked_for():
    """By `tf.gradients`, beside a tape."""

    def gradients():
        x, gamma = tf.constant([[1.0, 2.0, 4.0]]), tf.constant([1.0, 2.0, 3.0])
        with tf.GradientTape() as tape:
            tape.watch(gamma)
            y = layer_norm(x, gamma) ** 2
        return [*tf.gradients(y, x), tape.gradient(y, gamma)]

    expected = [value.numpy() for value in tf.function(gradients)()]
    for found in local(strategy_on(2), trace(strategy_on(2), gradients)()):
        for mine, reference in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, reference, rtol=1e-5)
