"""Products that oneDNN would form slowly: which they are, TensorFlow's values, and the graph that runs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import in_a_rank, local, strategy_on, trace

from tests.graph_optimizer import nodes_that_run
from tfdist.kernels import kernel_products


@pytest.mark.parametrize(
    ("inputs", "outputs", "is_slow"),
    [(256, 1024, True), (1024, 256, True), (256, 8192, True), (128, 2048, True), (64, 1024, True), (256, 3072, True)]
    + [(128, 512, True), (512, 384, True), (512, 512, True), (192, 1536, True)]
    + [(256, 1000, False), (256, 768, False), (256, 256, False), (32, 1024, False), (1, 4096, False), (64, 512, False)]
    + [(384, 1024, False), (1024, 4096, False), (2048, 2048, False)],  # packed
)
def test_which_gradients(inputs, outputs, is_slow):
    assert kernel_products.is_slow_gradient(inputs, outputs) == is_slow


@pytest.mark.parametrize(
    ("positions", "inputs", "outputs", "is_slow"),
    [(256, 128, 512, True), (128, 64, 1024, True), (512, 512, 512, True), (256, 512, 1536, True)]
    + [(256, 128, 500, False), (64, 128, 512, False), (256, 32, 512, False), (None, 128, 512, False), (0, 128, 512, False)]
    + [(1024, 128, 512, False), (512, 512, 1024, False)],  # packed
)
def test_which_results(positions, inputs, outputs, is_slow):
    assert kernel_products.is_slow_result(positions, inputs, outputs) == is_slow


@pytest.mark.parametrize(
    ("onednn", "flags", "expected"),
    [(True, "fpu avx2 fma", True), (True, "fpu avx2 avx512f", False), (True, "fpu avx", False), (False, "avx2", False)]
    + [(True, None, False)],
)
def test_which_machines(onednn, flags, expected, monkeypatch, tmp_path):
    class Build:
        IsMklEnabled = staticmethod(lambda: onednn)

    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n", encoding="utf-8")
    monkeypatch.setattr(kernel_products, "_pywrap_util_port", Build)
    monkeypatch.setattr(kernel_products, "_CPU_INFO", info)
    assert kernel_products._is_onednn_for_avx2.__wrapped__() == expected


def test_the_machine_is_asked():
    onednn = kernel_products._pywrap_util_port.IsMklEnabled()
    assert isinstance(onednn, bool)
    assert kernel_products._is_onednn_for_avx2() <= onednn


def values_and_gradients(function, x, kernel):
    """Returns the product, its gradients and those of the gradients' squares."""
    inputs = [tf.constant(x), tf.constant(kernel)]
    with tf.GradientTape() as outer:
        outer.watch(inputs)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = function(*inputs)
        gradients = tape.gradient(y, inputs, output_gradients=tf.cos(y))
        square = tf.add_n([tf.reduce_sum(gradient**2) for gradient in gradients])
    return [y, *gradients, *outer.gradient(square, inputs)]


FUNCTIONS = {
    "wide outputs": (keras.ops.matmul, (6, 4), (4, 7)),
    "wide inputs": (keras.ops.matmul, (6, 10), (10, 2)),
    "square": (keras.ops.matmul, (6, 4), (4, 4)),
    "batch": (keras.ops.matmul, (2, 3, 4), (4, 6)),
    "no rows": (keras.ops.matmul, (0, 4), (4, 7)),
    "einsum": (lambda x, kernel: keras.ops.einsum("abc,cde->abde", x, kernel), (2, 3, 4), (4, 5, 2)),
    "unknown": (tf.function(keras.ops.matmul, input_signature=[tf.TensorSpec((None, None, 4)), tf.TensorSpec((4, 7))]),)
    + ((2, 3, 4), (4, 7)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name, every_kernel_is_slow):
    function, *shapes = FUNCTIONS[name]
    rng = np.random.default_rng(5)
    inputs = [rng.normal(size=shape).astype("float32") for shape in shapes]
    expected = [tensor.numpy() for tensor in values_and_gradients(function, *inputs)]
    if name == "unknown":  # traced again, on the ranks
        function = tf.function(function.python_function, input_signature=function.input_signature)
    strategy = strategy_on(2)
    for found in local(strategy, trace(strategy, lambda: values_and_gradients(function, *inputs))()):
        for mine, reference in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, reference, rtol=2e-5, atol=2e-5)


def products_that_run(function, *shapes):
    """Returns of each product in the graph that runs whether it reads its operands as transposed."""

    @tf.function
    def gradients(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = function(*inputs)
        return tape.gradient(y, inputs, output_gradients=tf.cos(y))

    nodes = nodes_that_run(in_a_rank(lambda: gradients.get_concrete_function(*map(tf.TensorSpec, shapes))), *map(tf.ones, shapes))
    products = [node for node in nodes if node.op in ("MatMul", "_FusedMatMul")]
    return sorted((node.attr["transpose_a"].b, node.attr["transpose_b"].b) for node in products)


def test_grappler_does_not_fold_the_transposes(every_kernel_is_slow):
    along_rows, of_kernel = (False, True), (False, False)  # the result, with a transposed kernel, and the gradient of the input
    one_block = [of_kernel, along_rows, along_rows]
    assert products_that_run(keras.ops.matmul, (6, 2), (2, 3)) == one_block
    assert products_that_run(keras.ops.matmul, (6, 3), (3, 2)) == one_block
    assert products_that_run(keras.ops.matmul, (6, 2), (2, 8)) == [of_kernel] * 2 + one_block
    assert products_that_run(keras.ops.matmul, (6, 3), (3, 3)) == [along_rows] * 3


def test_others_are_left_to_keras(monkeypatch):
    monkeypatch.setattr(kernel_products, "_is_onednn_for_avx2", lambda: True)
    keras_own = [(False, False), (False, True), (True, False)]
    assert products_that_run(keras.ops.matmul, (6, 2), (2, 8)) == keras_own
    assert products_that_run(keras.ops.matmul, (6, 64), (64, 1024)) == [(False, False)] * 2 + [(False, True)]
    assert products_that_run(keras.ops.matmul, (128, 64), (64, 512)) == [(False, True)] * 2 + [(True, False)]
    monkeypatch.setattr(kernel_products, "_is_onednn_for_avx2", lambda: False)
    assert products_that_run(keras.ops.matmul, (6, 64), (64, 1024)) == keras_own


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes_and_ranks(dtype, every_kernel_is_slow):
    def products():
        x = tf.ones((2, 3), dtype)
        sparse = tf.sparse.from_dense([[0.0, 2.0, 0.0]])
        y = tf.ones((3, 4))
        return keras.ops.matmul(x, tf.ones((3, 4), dtype)), keras.ops.matmul(sparse, y), keras.ops.matmul(tf.ones(3), y)

    for found in local(strategy_on(1), trace(strategy_on(1), products)()):
        assert [value.shape for value in found] == [(2, 4), (1, 4), (4,)]
        assert found[0].dtype == dtype
        assert found[1].tolist() == [[2.0] * 4]
