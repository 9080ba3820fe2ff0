"""What counts as elementwise is: the same on a part of the axis as on the whole."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras.src import ops as keras_ops
from keras.src.activations import activations

from tfdist.extensions.tensor import elementwise
from tfdist.extensions.tensor.elementwise import is_elementwise_activation

# The public function of each class in the table, where it is not the class's name in lower case.
FUNCTIONS = {
    "ConvertToTensor": ops.convert_to_tensor,
    "DivideNoNan": ops.divide_no_nan,
    "HardShrink": ops.hard_shrink,
    "HardSigmoid": ops.hard_sigmoid,
    "HardSilu": ops.hard_silu,
    "HardTanh": ops.hard_tanh,
    "LeakyRelu": ops.leaky_relu,
    "LogSigmoid": ops.log_sigmoid,
    "ReLU": keras.activations.relu,
    "SoftShrink": ops.soft_shrink,
    "SparsePlus": ops.sparse_plus,
    "SparseSigmoid": ops.sparse_sigmoid,
    "StopGradient": ops.stop_gradient,
    "TanhShrink": ops.tanh_shrink,
    "TrueDivide": ops.true_divide,
}
ARGUMENTS = {"Cast": ("float16",), "Clip": (-0.5, 0.5), "Power": (2.0,), "Threshold": (0.1, 0.2)}
BINARY = "Add Divide DivideNoNan Logaddexp Maximum Minimum Multiply Subtract TrueDivide".split()


def function_of(name):
    return FUNCTIONS.get(name) or getattr(ops, name.lower())


def test_each_operation_of_the_table_is_elementwise():
    """And recorded under this name: a new name upstream would make Keras's own activations look foreign."""
    x = np.random.default_rng(0).uniform(0.1, 0.9, size=(3, 8)).astype("float32")
    for name in sorted(elementwise.OPERATIONS):
        function, extra = function_of(name), ARGUMENTS.get(name, ())
        arguments = (x, x[::-1].copy()) if name in BINARY else (x,)
        whole = ops.convert_to_numpy(function(*arguments, *extra))
        part = ops.convert_to_numpy(function(*(argument[:, 3:] for argument in arguments), *extra))
        np.testing.assert_allclose(part, whole[:, 3:], rtol=1e-5, err_msg=name)

        symbols = [keras.KerasTensor((3, 8)) for _ in arguments]
        operation = function(*symbols, *extra)._keras_history.operation
        assert type(operation).__name__ == name
        assert elementwise.is_elementwise(operation), name


@pytest.mark.parametrize(
    "function", [ops.softmax, ops.cumsum, ops.flip, ops.glu, ops.mean, lambda x: ops.clip(x, [0.0] * 8, 1.0)]
)
def test_other_operations_are_not(function):
    operation = function(keras.KerasTensor((3, 8)))._keras_history.operation
    assert not elementwise.is_elementwise(operation)


def test_a_users_operation_of_the_same_name_is_not():
    class Add(keras.Operation):
        pass

    assert not elementwise.is_elementwise(Add())


@pytest.mark.parametrize(
    "name", [None, "linear", "relu", "gelu", "silu", "tanh", "sigmoid", "elu", "mish", "relu6", "squareplus"]
)
def test_elementwise_activations(name):
    assert is_elementwise_activation(keras.activations.get(name))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "sparsemax", "glu"])
def test_other_activations(name):
    assert not is_elementwise_activation(keras.activations.get(name))


def test_any_function_may_be_an_activation():
    assert is_elementwise_activation(lambda x: ops.square(ops.relu(x)))
    assert not is_elementwise_activation(lambda x: x - ops.mean(x, axis=-1, keepdims=True))
    assert not is_elementwise_activation(lambda x: ops.reshape(x, (5, 5)))
    assert is_elementwise_activation(layers.LeakyReLU())
    with_weights = layers.PReLU()
    assert not is_elementwise_activation(with_weights)
    assert not with_weights.built  # nothing was tried on it


def test_layers():
    for layer in (layers.Dropout(0.1), layers.Activation("gelu"), layers.Multiply(), layers.ReLU(), layers.Identity()):
        assert elementwise.is_elementwise(layer), layer
    spatial = layers.Dropout(0.1, noise_shape=(None, 1))
    for layer in (spatial, layers.Activation("softmax"), layers.Softmax(), layers.Dense(3), layers.Concatenate()):
        assert not elementwise.is_elementwise(layer), layer
    assert not elementwise.is_elementwise(layers.Activation("relu", activity_regularizer="l2"))


def test_the_private_modules_of_the_operations():
    assert keras_ops.numpy.Add.__module__.startswith(elementwise._MODULES)
    assert activations.ReLU.__module__.startswith(elementwise._MODULES)
