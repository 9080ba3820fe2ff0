"""The private parts of Keras that tensor-parallel layers stand on: a change upstream fails here first."""

import inspect
import types

import keras
import tensorflow as tf
from keras.src.ops import nn as keras_ops_nn
from keras.src.saving import saving_lib
from keras_owners import Trainer
from keras_owners import nn as keras_nn
from keras_owners import numpy as keras_numpy
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import nn_ops, random_ops

from tfdist.sharding import keras_scope


def original(function):
    return inspect.unwrap(function._tfdist_original)


def test_a_variable_is_made_from_its_initializer_at_once_or_later():
    calls = []

    def initializer(shape, dtype=None):
        calls.append(tuple(shape))
        return keras.ops.ones(shape, dtype)

    variable = keras.Variable(initializer, shape=(2, 3))
    variable._initialize_with_initializer(lambda shape, dtype=None: keras.ops.zeros(shape, dtype))
    assert float(keras.ops.sum(variable._value)) == 0
    assert variable._trainable is True
    variable.trainable = False
    assert variable._trainable is False and variable._value.trainable
    with keras.StatelessScope():
        later = keras.Variable(initializer, shape=(4,))
        assert later._value is None
        assert later._initializer is initializer
    assert later._value is not None
    assert calls == [(2, 3), (4,)]


def test_gelu_is_the_backends():
    assert original(keras_nn.gelu).__module__ == keras_nn.__name__
    assert list(inspect.signature(original(keras_nn.gelu)).parameters) == ["x", "approximate"]
    assert "nn.gelu(" in inspect.getsource(keras.ops.gelu)


def test_norms_attention_and_products_are_looked_up_where_they_are_overridden():
    def parameters(function):
        return list(inspect.signature(original(function)).parameters)

    layer = ["x", "gamma", "beta", "axis", "epsilon", "rms_scaling"]
    assert parameters(keras_ops_nn._layer_normalization) == layer
    assert "return _layer_normalization(" in inspect.getsource(keras_ops_nn.layer_normalization)
    assert parameters(keras_ops_nn._rms_normalization) == ["x", "scale", "axis", "epsilon"]
    assert "return _rms_normalization(" in inspect.getsource(keras_ops_nn.rms_normalization)
    attention = ["query", "key", "value", "bias", "mask", "is_causal", "scale"]
    assert parameters(keras_nn._dot_product_attention_xla) == attention
    assert "return _dot_product_attention_xla(" in inspect.getsource(keras_nn.dot_product_attention)
    assert parameters(keras_numpy.einsum) == ["subscripts", "operands", "kwargs"]
    assert "numpy.einsum(" in inspect.getsource(keras.ops.einsum)


def test_losses_and_metrics_are_given_predictions_so():
    arguments = ["self", "y_true", "y_pred", "sample_weight"]
    assert list(inspect.signature(original(keras.losses.Loss.__call__)).parameters) == arguments
    arguments = ["self", "x", "y", "y_pred", "sample_weight"]
    assert list(inspect.signature(original(Trainer.compute_metrics)).parameters) == arguments
    assert "_compile_metrics" in inspect.getsource(Trainer.compile.__wrapped__)


def test_attentions_are_made_of_these_sublayers():
    attention = keras.layers.MultiHeadAttention(2, 3, use_gate=True)
    attention.build((None, 4, 6), (None, 4, 6))
    grouped = keras.layers.GroupQueryAttention(3, 4, 2, use_gate=True)
    grouped.build((None, 4, 6), (None, 4, 6))
    for layer in (attention, grouped):
        for name in ("_query_dense", "_key_dense", "_value_dense", "_gate_dense", "_output_dense"):
            dense = getattr(layer, name)
            assert type(dense) is keras.layers.EinsumDense
            assert dense._kernel.path.endswith("kernel")


def test_layers_are_built_with_the_scopes_of_their_callers():
    found = []

    class Inner(keras.layers.Layer):
        def build(self, shape):
            found.extend(keras_scope.callers())

        def call(self, x):
            return x

    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def call(self, x):
            return self.inner(x)

    outer = Outer()
    assert outer._distribute_strategy is None, "that of the scope in which it was made"
    outer(keras.ops.ones((2, 3)))
    assert found[0] is outer.inner and found[-1] is outer
    inputs = keras.Input((3,))
    layer, node, _ = keras.layers.Dense(2)(inputs)._keras_history
    assert layer._inbound_nodes[node].input_tensors[0] is inputs


def test_a_stateful_layer_has_states_of_a_size():
    layer = keras.layers.LSTM(2, stateful=True)
    layer(keras.ops.ones((4, 3, 1)))
    assert [state._shape for state in layer.states] == [(4, 2), (4, 2)]
    assert layer._expected_batch_size == 4


def test_the_global_generator_is_found_and_set_by_its_name():
    before = keras_scope.global_generator()
    keras_scope.set_global_generator(None)
    keras.random.uniform(())
    assert isinstance(keras_scope.global_generator(), keras.random.SeedGenerator)
    drawn = []
    own = types.SimpleNamespace(next=lambda ordered: drawn.append(ordered) or tf.constant([1, 2], tf.int64))
    keras_scope.set_global_generator(own)
    keras.random.uniform(())
    assert drawn == [False]
    keras_scope.set_global_generator(before)


def test_random_operations_look_for_their_seeds_where_it_is_replaced():
    for module in (random_ops, nn_ops):
        assert module.random_seed.get_seed is random_seed.get_seed
        assert "random_seed.get_seed(seed)" in inspect.getsource(module)
    assert list(inspect.signature(original(random_seed.get_seed)).parameters) == ["op_seed"]


def test_the_private_name():
    assert list(inspect.signature(saving_lib._get_unique_name).parameters) == ["name", "used_names"]
    assert "_get_unique_name(" in inspect.getsource(saving_lib._save_container_state)
    assert "_get_unique_name(" in inspect.getsource(saving_lib._load_container_state)
