"""The switch of the kernels: where they stand in the place of Keras's functions, and where these run untouched."""

import ast
import gc
import pathlib
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import strategy_on, trace
from tensorflow.python.framework import func_graph

from tfdist.extensions.kernels import keras_rows as kernels
from tfdist.keras_hooks import TABLE

QUERIES = np.ones((2, 5, 4, 3), "float32")
ROWS = np.ones((2, 5, 7), "float32")
# Of each kernel: a call of Keras's, and an operation that only Keras's function, or only the kernel, makes.
CALLS = {
    "gelu": (lambda x: keras.ops.gelu(x, approximate=False), ROWS, "Erfc", None),
    "norm": (keras.ops.layer_normalization, ROWS, "SquaredDifference", None),
    "rms norm": (keras.ops.rms_normalization, ROWS, None, None),
    "attention": (lambda x: keras.ops.dot_product_attention(x, x, x), QUERIES, "Einsum", "BatchMatMulV2"),
    "einsum": (lambda x: keras.ops.einsum("abc,cde->abde", x, np.ones((7, 3, 2), "float32")), ROWS, None, "MatMul"),
    "crossentropy": (
        lambda x: keras.ops.sparse_categorical_crossentropy(np.zeros((2, 5), "int64"), x, from_logits=True),
        ROWS,
        "SparseSoftmaxCrossEntropyWithLogits",
        None,
    ),
}


def operations(function, x, **settings):
    """Returns the types of the operations that a rank traces, in order."""
    found = []

    def on_rank():
        call = tf.function(function).get_concrete_function(tf.constant(x))
        found.append([operation.type for operation in call.graph.get_operations()])
        return tf.zeros([])

    trace(strategy_on(1, **settings), on_rank)()
    return found[0]


@pytest.mark.parametrize("name", CALLS)
def test_the_switch(name):
    function, x, of_keras, of_kernel = CALLS[name]
    alone = [operation.type for operation in tf.function(function).get_concrete_function(tf.constant(x)).graph.get_operations()]
    assert operations(function, x, use_kernels=False) == alone
    with_kernels = operations(function, x, use_kernels=True)
    assert with_kernels != alone
    for operation, graph, other in ((of_keras, alone, with_kernels), (of_kernel, with_kernels, alone)):
        assert operation is None or (operation in graph and operation not in other)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_by_default_kernels_are_for_devices_on_which_they_were_measured(on_cpu, monkeypatch):
    """On CPUs; `use_kernels=True` makes that all devices, of which the cross-entropy leaves out those that check no label."""
    find = kernels.rank_program
    monkeypatch.setattr(kernels, "rank_program", lambda: types.SimpleNamespace(is_on_cpu=on_cpu, exists_here=find().exists_here))
    for name, (function, x, _, _) in CALLS.items():
        by_default, on, off = (operations(function, x, use_kernels=use) for use in (None, True, False))
        assert by_default == (on if on_cpu else off)
        assert (on == off) == (name == "crossentropy" and not on_cpu)


@pytest.mark.parametrize("value", [1, "no"])
def test_the_setting_is_checked(value):
    with pytest.raises(ValueError, match="`use_kernels` must be True or False or None"):
        strategy_on(1, use_kernels=value)


def test_the_benchmark_knows_every_kernel():
    """`benchmarks.kernels` sets the environment when it is imported, so that its table is read instead."""
    tree = ast.parse((pathlib.Path(__file__).parents[3] / "benchmarks" / "kernels.py").read_text())
    (table,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "KERNELS"]
    measured = {function for functions in ast.literal_eval(table).values() for function in functions}
    assert measured == {row.name for row in TABLE.rows if row.binding.__module__ == kernels.__name__}


def test_no_graph_stays():
    """With `tf.custom_gradient` one stays of every trace."""

    def gradients():
        x = tf.constant(ROWS)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = keras.ops.layer_normalization(keras.ops.gelu(x))
            loss = keras.ops.sparse_categorical_crossentropy(np.zeros((2, 5), "int64"), y, from_logits=True)
        return tape.gradient(loss, x)

    strategy, counts = strategy_on(1), []
    for _ in range(4):
        trace(strategy, gradients)()
        gc.collect()
        counts.append(sum(isinstance(one, func_graph.FuncGraph) for one in gc.get_objects()))
    assert len(set(counts[1:])) == 1, counts
