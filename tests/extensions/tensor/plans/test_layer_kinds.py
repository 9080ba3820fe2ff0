"""Where each kind is sharded: the sum or the concatenation of the parts is the layer."""

import keras
import numpy as np
import pytest
from keras import layers

from tfdist.extensions.tensor.plans import sharded_axes, sharded_weights
from tfdist.extensions.tensor.plans.layer_kinds import kind_of, obstacle, roles_of, saved_bytes, sharded_sizes

RANKS = 2


def called(layer, *shape):
    """Returns the layer, built by a call, with weights that are not zero, an input and its output."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype("float32")
    layer(x)
    for weight in layer.weights:
        weight.assign(rng.normal(size=weight.shape))
    return x, keras.ops.convert_to_numpy(layer(x))


def apply(layer, x, kernel, bias=None):
    """The layer's own formula for parts of its weights."""
    y = np.einsum(layer.equation, x, kernel) if isinstance(layer, layers.EinsumDense) else x @ kernel
    return y if bias is None else y + bias


def parts(array, axis):
    return np.split(np.asarray(array), RANKS, axis) if axis is not None else [np.asarray(array)] * RANKS


CASES = {
    "Dense": (lambda: layers.Dense(6), (3, 5, 4)),
    "Dense without bias": (lambda: layers.Dense(6, use_bias=False), (3, 4)),
    "projection to heads": (lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 6), bias_axes="de"), (3, 5, 4)),
    "bias on the other axis": (lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 6), bias_axes="e"), (3, 5, 4)),
    "projection from heads": (lambda: layers.EinsumDense("abde,def->abf", (None, 6), bias_axes="f"), (3, 5, 2, 7)),
    "ellipsis before": (lambda: layers.EinsumDense("...x,xy->...y", 6, bias_axes="y"), (3, 5, 4)),
    "ellipsis after": (lambda: layers.EinsumDense("ab...,bc->ac...", 6, bias_axes="c"), (3, 4, 5)),
}


@pytest.mark.parametrize("case", CASES)
def test_column_parts_are_concatenated(case):
    make, shape = CASES[case]
    layer = make()
    x, y = called(layer, *shape)
    axes = sharded_axes(layer, "column")
    biases = [None] * RANKS if layer.bias is None else parts(layer.bias, axes.bias)
    local = [apply(layer, x, *pair) for pair in zip(parts(layer.kernel, axes.kernel), biases, strict=True)]
    assert axes.inputs is None
    np.testing.assert_allclose(np.concatenate(local, axes.outputs), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_row_parts_are_summed(case):
    make, shape = CASES[case]
    layer = make()
    x, y = called(layer, *shape)
    axes = sharded_axes(layer, "row")
    assert axes.bias is None and axes.outputs is None
    local = [apply(layer, *pair) for pair in zip(parts(x, axes.inputs), parts(layer.kernel, axes.kernel), strict=True)]
    whole = sum(local) if layer.bias is None else sum(local) + np.asarray(layer.bias)
    np.testing.assert_allclose(whole, y, rtol=1e-4, atol=1e-5)


def test_sizes_that_a_cut_must_divide():
    dense, einsum = layers.Dense(6), CASES["projection to heads"][0]()
    called(dense, 3, 4)
    called(einsum, 3, 5, 4)
    assert sharded_sizes(dense, "column") == {"units": 6}
    assert sharded_sizes(dense, "row") == {"input features": 4}
    assert sharded_sizes(einsum, "column") == {"axis 'd' of 'abc,cde->abde'": 2}
    assert sharded_sizes(einsum, "row") == {"axis 'c' of 'abc,cde->abde'": 4}
    assert sharded_sizes(layers.Embedding(7, 4), "vocab") == {}
    assert sharded_sizes(layers.MultiHeadAttention(4, 8), "column") == {"num_heads": 4}
    grouped = layers.GroupQueryAttention(8, 4, 2)
    assert sharded_sizes(grouped, "column") == {"num_query_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda gate: layers.MultiHeadAttention(4, 5, 3, use_gate=gate),
        lambda gate: layers.GroupQueryAttention(5, 4, 2, use_gate=gate),
    ],
)
def test_heads_are_the_cut_axis_of_every_attention_weight(make, gate):
    attention = make(gate)
    attention.build((None, 7, 8), (None, 7, 8))
    heads = {"value": (4, 2), "key": (4, 2)}
    found = sharded_weights(attention, "column")
    assert len(found) == len(attention.weights) == (10 if gate else 8)
    for weight, axis in found:
        projection, name = weight.path.split("/")[-2:]
        if projection == "attention_output" and name == "bias":
            assert axis is None
        else:
            assert weight.shape[axis] in heads.get(projection, (4,))
            assert weight.shape[axis] != 8


def test_saved_bytes():
    dense = layers.Dense(6)
    called(dense, 3, 4)
    assert saved_bytes(dense, "column", 2) == 4 * (4 * 6 + 6) // 2
    assert saved_bytes(dense, "row", 2) == 4 * 4 * 6 // 2  # the bias is whole
    assert saved_bytes(dense, "replicate", 2) == saved_bytes(dense, "row", 1) == 0
    embedding = layers.Embedding(7, 5)
    embedding.build()
    assert saved_bytes(embedding, "vocab", 3) == 4 * (7 - 3) * 5  # 3 rows a rank: 7 are padded to 9
    half = layers.Dense(6, dtype="float16")
    called(half, 3, 4)
    assert saved_bytes(half, "column", 2) == 4 * 6 + 6


def test_subclasses():
    class Renamed(layers.Dense):
        pass

    class Other(layers.Dense):
        def call(self, inputs):
            return super().call(inputs) * 2

    class OtherAttention(layers.MultiHeadAttention):
        def _compute_attention(self, *args, **kwargs):
            return super()._compute_attention(*args, **kwargs)

    assert kind_of(Renamed(3)).name == "Dense"
    assert kind_of(Other(3)) is None and roles_of(Other(3)) == ()
    assert kind_of(OtherAttention(2, 4)) is None
    assert kind_of(layers.LayerNormalization()) is None
    assert kind_of(layers.GroupQueryAttention(8, 4, 2)).name == "GroupQueryAttention"


def test_an_equation_may_leave_no_role():
    scale = layers.EinsumDense("ab,b->ab", (6,))
    scale.build((None, 6))
    assert roles_of(scale) == ()


def test_obstacles():
    dense = layers.Dense(6)
    called(dense, 3, 4)
    assert obstacle(dense) is None
    dense.enable_lora(2)  # its factors are sharded with the kernel
    assert obstacle(dense) is None
    axes = {weight.name: axis for weight, axis in sharded_weights(dense, "column")}
    assert axes == {"kernel": 1, "bias": 0, "lora_kernel_a": None, "lora_kernel_b": 1}
    axes = {weight.name: axis for weight, axis in sharded_weights(dense, "row")}
    assert axes == {"kernel": 0, "bias": None, "lora_kernel_a": 0, "lora_kernel_b": None}
    quantized = layers.Dense(6)
    called(quantized, 3, 4)
    quantized.quantize("int8")
    assert obstacle(quantized) == "it is quantized"
    learned = layers.Dense(6, activation=layers.PReLU())
    called(learned, 3, 4)
    assert obstacle(learned) == "its activation has weights"
    attention = layers.MultiHeadAttention(2, 3, activity_regularizer="l2")
    attention(keras.Input((4, 6)), keras.Input((4, 6)))
    assert obstacle(attention) == "its activity regularizer would see a part of the heads only"
