"""Attention and projections on the ranks: Keras's values and gradients, as products of matrices."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import in_a_rank, local, strategy_on, trace

from tfdist.extensions.kernels.matrix_products import contracted_axes


def normal(*shapes):
    """Returns an array for each shape, the same in every test."""
    rng = np.random.default_rng(3)
    return [rng.normal(size=shape) for shape in shapes]


def values_and_gradients(function, inputs, upstream):
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = function(*inputs)
    return [y, *tape.gradient(y, inputs, output_gradients=None if upstream is None else tf.cast(upstream, y.dtype))]


def compare(function, inputs, upstream, tolerance):
    """Asserts that two ranks find what one device does."""
    inputs = [tf.constant(x) for x in inputs]
    expected = [tensor.numpy() for tensor in values_and_gradients(function, inputs, upstream)]
    strategy = strategy_on(2)
    for found in local(strategy, trace(strategy, lambda: values_and_gradients(function, inputs, upstream))()):
        for mine, reference in zip(found, expected, strict=True):
            assert mine.dtype == reference.dtype
            np.testing.assert_allclose(mine, reference, rtol=tolerance, atol=tolerance * np.abs(reference).max())


def operations_of(function, *specs, on_a_rank):
    """Returns the operation types of a traced function with gradients, as a rank traces it or as Keras alone."""

    @tf.function
    def call(*inputs):
        return values_and_gradients(function, inputs, None)

    def types():
        graph = call.get_concrete_function(*specs).graph
        return [operation.type for operation in graph.get_operations()]

    return in_a_rank(types) if on_a_rank else types()


MASK = np.array([[1, 0, 0, 1, 1, 1], [1, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0]], bool)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"is_causal": True},
        {"mask": MASK},  # its third query sees nothing
        {"mask": MASK[None, None] & np.array([True, False])[:, None, None, None], "is_causal": True, "scale": 0.3},
        {"bias": normal((1, 4, 5, 6))[0], "scale": 2.0},
        {"bias": np.where(MASK, 0.0, -6e4), "is_causal": True},
    ],
    ids=["plain", "causal", "mask", "both", "bias", "causal, bias"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 3e-6), ("float64", 1e-12), ("float16", 1e-2), ("bfloat16", 4e-2)])
def test_attention(settings, dtype, tolerance):
    *inputs, upstream = normal(*((2, length, 4, size) for length, size in [(5, 3), (6, 3), (6, 7), (5, 7)]))
    inputs = [tf.cast(x, dtype).numpy() for x in inputs]
    if "bias" in settings:
        settings = {**settings, "bias": tf.cast(settings["bias"], dtype).numpy()}

    def attend(query, key, value):
        return keras.ops.dot_product_attention(query, key, value, **settings)

    compare(attend, inputs, upstream, tolerance)


def test_attention_of_grouped_queries():
    *inputs, upstream = (x.astype("float32") for x in normal(*((2, 5, number, 3) for number in (4, 2, 2, 4))))
    compare(keras.ops.dot_product_attention, inputs, upstream, 3e-6)


def test_attention_moves_each_tensor_once():
    specs = [tf.TensorSpec((2, 5, 4, 3))] * 3
    found = operations_of(keras.ops.dot_product_attention, *specs, on_a_rank=True)
    assert found.count("Einsum") == 0
    assert found.count("Transpose") == 8  # query, key, value and result, and their gradients
    assert operations_of(keras.ops.dot_product_attention, *specs, on_a_rank=False).count("Einsum") == 6


def test_a_causal_mask_is_added():
    """Where it is the only one: no score is selected, nor a gradient."""
    attend = functools.partial(keras.ops.dot_product_attention, is_causal=True)
    specs = [tf.TensorSpec((2, 5, 4, 3))] * 3
    assert operations_of(attend, *specs, on_a_rank=True).count("SelectV2") == 1  # the mask itself
    biased = functools.partial(attend, bias=np.zeros((5, 5), "float32"))
    assert operations_of(biased, *specs, on_a_rank=True).count("SelectV2") == 3  # of the scores, and of both sides' gradients


PROJECTIONS = {"ab,bc->ac": 1, "abc,cd->abd": 1, "abc,cde->abde": 1, "abcd,cde->abe": 2, "abcd,de->abce": 1, "zyx,xw->zyw": 1}


@pytest.mark.parametrize(("equation", "contracted"), PROJECTIONS.items())
@pytest.mark.parametrize("unknown", [(), (0,), (0, 1)], ids=["static", "batch", "batch and length"])
def test_projection(equation, contracted, unknown):
    sizes = dict(zip("abcdewxyz", [3, 4, 5, 6, 2, 4, 5, 3, 2], strict=True))
    first, second = ([sizes[label] for label in term] for term in equation.partition("->")[0].split(","))
    if len(first) - contracted <= max(unknown, default=0):
        unknown = ()
    specs = [tf.TensorSpec([None if axis in unknown else size for axis, size in enumerate(first)]), tf.TensorSpec(second)]
    result = [*first[:-contracted], *second[contracted:]]
    shapes = []

    def project(x, kernel):
        traced = tf.function(lambda x, kernel: keras.ops.einsum(equation, x, kernel)).get_concrete_function(*specs)
        shapes.append(traced.output_shapes)
        return traced(x, kernel)

    *inputs, upstream = (x.astype("float32") for x in normal(first, second, result))
    compare(project, inputs, upstream, 3e-6)
    known = [None if axis in unknown else size for axis, size in enumerate(result)]
    assert [shape.as_list() for shape in shapes] == [known] * len(shapes)
    found = operations_of(lambda x, kernel: keras.ops.einsum(equation, x, kernel), *specs, on_a_rank=True)
    assert found.count("MatMul") == 3
    assert not {"Einsum", "BatchMatMulV2", "Sum"} & set(found)


def test_an_empty_batch_is_projected():
    def project():
        return keras.ops.einsum("abc,cde->abde", tf.zeros((0, 4, 5)), tf.ones((5, 3, 2)))

    for found in local(strategy_on(2), trace(strategy_on(2), project)()):
        assert found.shape == (0, 4, 3, 2)


@pytest.mark.parametrize(
    "equation",
    ["abc,dc->abd", "abc,dce->abde", "abcd,abde->abce", "ab,b->a", "a,b->ab", "b,bc->c", "abc,bcd->ad ", "aab,bc->aac"]
    + ["abc,cd->adb", "abc,cd", "abc->a", "...b,bc->...c", "ab,bc->a", "ab,bc,cd->ad", ""],
)
def test_equations_that_are_no_product_of_two_matrices(equation):
    assert contracted_axes(equation) == (2 if equation == "abc,bcd->ad " else 0)


def test_equations_that_are_left_to_keras():
    for equation, shapes in {"abc,dc->abd": [(2, 3, 4), (5, 4)], "abcd,abde->abce": [(2, 3, 4, 5), (2, 3, 5, 6)]}.items():
        specs = [tf.TensorSpec(shape) for shape in shapes]
        ways = [
            operations_of(lambda x, y, equation=equation: keras.ops.einsum(equation, x, y), *specs, on_a_rank=here)
            for here in (True, False)
        ]
        assert ways[0] == ways[1]
    integers = [tf.ones((2, 3, 4), tf.int32), tf.ones((4, 5), tf.int32)]
    for found in local(strategy_on(1), trace(strategy_on(1), lambda: keras.ops.einsum("abc,cd->abd", *integers))()):
        assert found.dtype == "int32"
