"""What the pipeline takes from Keras without a public name. When a test fails here, Keras has changed it."""

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

from tfdist.extensions.pipeline.stages.stage import nodes_in_order

layers = keras.layers


def model():
    keras.backend.clear_session()  # names of operations count on
    inputs = keras.Input((3,), name="inputs")
    x = layers.Dense(4, name="first")(inputs)
    return keras.Model(inputs, {"out": layers.Dense(2, name="second")(keras.ops.tanh(x))})


def test_nodes():
    """In the order of computation; their arguments can be filled in; outputs know their operation."""
    inner = model()
    nodes = nodes_in_order(inner)
    assert [node.operation.name for node in nodes] == ["first", "tanh", "second"]
    values = {id(inner.inputs[0]): tf.ones([2, 3])}
    for node in nodes:
        assert all(id(tensor) in values for tensor in node.input_tensors) and not node.is_input
        args, kwargs = node.arguments.fill_in(values)
        (values[id(node.outputs[0])],) = [node.operation(*args, **kwargs)]
        assert node.outputs[0]._keras_history.operation is node.operation
    np.testing.assert_allclose(values[id(inner.outputs[0])], inner(tf.ones([2, 3]))["out"])
    assert nodes_in_order(keras.Sequential([keras.Input((3,)), layers.Dense(2)])._functional)


def test_structures():
    inner = model()
    assert keras.tree.flatten(inner._inputs_struct) == inner.inputs
    assert keras.tree.flatten(inner._outputs_struct) == inner.outputs and list(inner._outputs_struct) == ["out"]
    (x,) = inner._standardize_inputs(np.ones((2, 3)))
    assert x.dtype == tf.float32


def test_call_context():
    assert "training" in layers.Dropout(0.5)._call_context_args


def test_losses_of_layers():
    layer = layers.Dense(2, activity_regularizer="l2")
    layer(tf.ones([1, 3]))
    assert len(layer._get_own_losses()) == 1 and layer in layer._flatten_layers()
    assert layer._losses == layer._get_own_losses()


def test_compiling_and_building():
    """A compiled model's settings can be given to another; a symbolic build goes through one method."""
    inner = model()
    inner.compile("sgd", "mse")
    other = model()
    other.compile(**inner._compile_config.config)
    assert other.compiled and other.loss == "mse"
    assert callable(inner._symbolic_build)


def test_trackers_of_losses():
    inputs = keras.Input((3,))
    two = keras.Model(inputs, [layers.Dense(1)(inputs), layers.Dense(1)(inputs)])
    two.compile("sgd", ["mse", "mse"])
    two.train_on_batch(np.ones((2, 3)), [np.ones((2, 1))] * 2)
    assert [metric.name.endswith("_loss") for metric in two._compile_loss._metrics] == [True, True]
    assert callable(two._compute_loss) and isinstance(two._loss_tracker, keras.metrics.Mean)


def test_masks():
    x = tf.ones([2, 3])
    assert get_keras_mask(x) is None
    set_keras_mask(x, tf.constant([True, False]))
    assert get_keras_mask(x) is not None


def test_variables_that_are_put_off():
    """A variable is made by `_initialize_with_initializer`, and one of a stateless scope by `_deferred_initialize`."""
    with keras.StatelessScope():
        variable = keras.Variable("ones", shape=(2,))
        assert variable._value is None and callable(variable._initializer)
        np.testing.assert_array_equal(variable.value, [1, 1])
    assert isinstance(variable._value, tf.Variable) and variable._initializer is None
    variable._initialize_with_initializer(lambda shape, dtype=None: tf.zeros(shape, dtype))
    np.testing.assert_array_equal(variable.numpy(), [0, 0])
