"""What layers cost, by closed formulas."""

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.devices import of_cpus
from tfdist.extensions.pipeline.stages.costs import Cost, bytes_per_example, node_costs
from tfdist.extensions.pipeline.stages.flops import UNKNOWN_SIZE
from tfdist.extensions.pipeline.stages.stage import nodes_in_order


def costs_of(shape, function, dtype="float32", **kwargs):
    """Returns the costs of the model that applies `function` to an input, by name."""
    inputs = keras.Input(shape, dtype=dtype, **kwargs)
    module = keras.Model(inputs, function(inputs))
    costs = node_costs(module)
    assert [cost.name for cost in costs] == [node.operation.name for node in nodes_in_order(module)]
    return {cost.name: cost for cost in costs}


def cost_of(shape, layer, dtype="float32"):
    return costs_of(shape, layer, dtype)[layer.name]


def test_dense():
    assert cost_of((7, 5), layers.Dense(3, name="d")) == Cost("d", 7 * (2 * 5 * 3 + 3), 4 * (5 * 3 + 3), 4 * 7 * 3)
    assert cost_of((5,), layers.Dense(3, use_bias=False, activation="tanh")).flops == 2 * 5 * 3 + 3
    assert cost_of((None, 5), layers.Dense(3)).flops == UNKNOWN_SIZE * (2 * 5 * 3 + 3)


def test_embedding():
    assert cost_of((7,), layers.Embedding(11, 5, name="e"), "int32") == Cost("e", 0, 4 * 11 * 5, 4 * 7 * 5)


def test_convolutions():
    assert cost_of((8, 9, 4), layers.Conv2D(6, 3, use_bias=False)).flops == 6 * 7 * 6 * 2 * 9 * 4
    assert cost_of((8, 9, 4), layers.Conv2D(6, 3, groups=2, use_bias=False)).flops == 6 * 7 * 6 * 2 * 9 * 2
    assert cost_of((8, 9, 4), layers.Conv2D(6, 3, strides=2, padding="same")).flops == 4 * 5 * 6 * (2 * 9 * 4 + 1)
    assert cost_of((9, 4), layers.Conv1D(6, 3, use_bias=False)).flops == 7 * 6 * 2 * 3 * 4
    assert cost_of((8, 9, 4), layers.DepthwiseConv2D(3, depth_multiplier=2, use_bias=False)).flops == 6 * 7 * 8 * 2 * 9
    assert cost_of((8, 9, 4), layers.Conv2DTranspose(6, 3, use_bias=False)).flops == 8 * 9 * 4 * 2 * 9 * 6


def test_attention():
    length, heads, size, features = 7, 2, 4, 10
    attention = layers.MultiHeadAttention(heads, size, name="a")
    cost = costs_of((length, features), lambda x: attention(x, x))["a"]
    width = heads * size
    projections = 4 * 2 * length * features * width + length * (3 * width + features)  # products and biases
    scores = 2 * 2 * length**2 * width + length * width + heads * length**2  # two products, scale, softmax
    assert abs(cost.flops - projections - scores) <= heads * length**2  # the scale is of the queries or of the scores
    assert cost.weight_bytes == 4 * (4 * features * width + 3 * width + features)


@of_cpus("on a GPU Keras takes cuDNN's LSTM, whose cost is counted without gates")
def test_recurrent():
    steps, inputs, units = 7, 5, 3
    step = 2 * 4 * units * (inputs + units) + 2 * 4 * units + 9 * units  # products, sums, gates
    assert cost_of((steps, inputs), layers.LSTM(units)).flops == steps * step
    assert cost_of((steps, inputs), layers.LSTM(units, unroll=True)).flops == steps * step
    assert cost_of((None, inputs), layers.LSTM(units, return_sequences=True)).flops == UNKNOWN_SIZE * step
    assert cost_of((steps, inputs), layers.Bidirectional(layers.LSTM(units))).flops == 2 * steps * step
    cell = layers.StackedRNNCells([layers.LSTMCell(units), layers.LSTMCell(units)])
    assert cost_of((steps, units), layers.RNN(cell)).flops == 2 * steps * (step + 2 * 4 * units * (units - inputs))


@of_cpus("on a GPU Keras takes cuDNN's LSTM")
def test_a_masked_loop():
    costs = costs_of((7,), lambda x: layers.LSTM(3, name="l")(layers.Embedding(11, 5, mask_zero=True)(x)), "int32")
    assert 7 < costs["l"].flops / cost_of((1, 5), layers.LSTM(3)).flops < 8


def test_time_distributed():
    assert cost_of((7, 5), layers.TimeDistributed(layers.Dense(3))).flops == 7 * (2 * 5 * 3 + 3)


def test_nested_models():
    inner = keras.Sequential([keras.Input((5,)), layers.Dense(4), layers.Dense(3)], name="inner")
    cost = cost_of((5,), inner)
    assert cost == Cost("inner", 2 * (5 * 4 + 4 * 3) + 7, 4 * (5 * 4 + 4 + 4 * 3 + 3), 12)

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__(name="outer")
            self.inner = inner

        def call(self, x):
            return self.inner(x)

    assert cost_of((5,), Subclassed()) == Cost("outer", *list(vars(cost).values())[1:])


def test_operations():
    keras.backend.clear_session()  # names of operations count on
    costs = costs_of((6,), lambda x: keras.ops.reshape(keras.ops.tanh(x), (-1, 2, 3)))
    assert costs["tanh"] == Cost("tanh", 6, 0, 24)
    assert costs["reshape"] == Cost("reshape", 0, 0, 24)


def test_a_layer_that_is_called_twice_has_its_weights_once():
    dense, inputs = layers.Dense(5), keras.Input((5,))
    first, second = node_costs(keras.Model(inputs, dense(dense(inputs))))
    assert first.flops == second.flops == 55
    assert (first.weight_bytes, second.weight_bytes) == (120, 0)


def test_a_fixed_batch_size_is_divided_by():
    dense, inputs = layers.Dense(3), keras.Input((5,), batch_size=4)
    (cost,) = node_costs(keras.Model(inputs, dense(inputs)))
    assert cost == Cost(dense.name, 33, 72, 12)


def test_merged_axes_are_known():
    """Keras knows neither of the axes of the reshaped tensor, only that the last is 5."""
    dense = layers.Dense(3)
    costs = costs_of((None, 5), lambda x: dense(keras.ops.reshape(x, (-1, 5))))
    assert costs[dense.name].flops == UNKNOWN_SIZE * 33


def test_dtypes():
    dense = layers.Dense(3, dtype="mixed_bfloat16", name="half")
    assert cost_of((5,), dense) == Cost("half", 33, 4 * 18, 2 * 3)
    assert bytes_per_example([keras.KerasTensor((None, 7, 3), "bfloat16"), keras.KerasTensor((None, None), "int32")]) == 42 + 512


class Unwilling(layers.Layer):
    """Cannot be called on other symbols than those of Keras."""

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], 3))

    def compute_output_spec(self, x):
        return keras.KerasTensor((*x.shape[:-1], 3))

    def call(self, x):
        return tf.matmul(x, self.kernel.numpy())


def test_what_cannot_be_traced_is_guessed_and_said():
    inputs = keras.Input((7, 5))
    module = keras.Model(inputs, layers.Dense(2)(Unwilling(name="unwilling")(inputs)))
    with pytest.warns(UserWarning, match="cost of 'unwilling' is guessed from its weights"):
        guessed, dense = node_costs(module)
    assert guessed == Cost("unwilling", 2 * 15 * 7, 60, 4 * 21)
    assert dense.flops == 7 * (2 * 3 * 2 + 2)


def test_nothing_is_made_read_or_changed(cpus):
    with tfdist.ShardedStrategy(cpus[:2], pipeline_parallel_size=2).scope():
        inputs = keras.Input((7,), dtype="int32")
        x = layers.Embedding(11, 6)(inputs)
        x = layers.LSTM(6, return_sequences=True)(layers.MultiHeadAttention(2, 3)(x, x))
        x = layers.BatchNormalization()(layers.Dropout(0.5)(x))
        module = keras.Model(inputs, layers.Dense(3, activity_regularizer="l2")(x))
        costs = node_costs(module)
    assert len(costs) == 6
    assert len(module.weights) > 10 and all(variable._value is None for variable in module.weights)
    assert not module.losses


def test_it_costs_the_same_without_a_strategy(cpus):
    def costs():
        inputs = keras.Input((7, 6))
        return node_costs(keras.Model(inputs, layers.LayerNormalization(name="norm")(layers.Dense(6, name="dense")(inputs))))

    with tfdist.ShardedStrategy(cpus[:2], pipeline_parallel_size=2).scope():
        inside = costs()
    assert inside == costs()
