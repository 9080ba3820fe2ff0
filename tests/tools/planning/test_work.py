"""What a traced step computes, where it is known by arithmetic."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.tools.planning.hardware import Hardware
from tfdist.tools.planning.traced_model import trace
from tfdist.tools.planning.work import transposed_bytes, work_of

COUNTS = Hardware("counts FLOPs", {"float32": [(1.0, 1.0)]}, float("inf"), 0.0, {})


def mlp():
    layers = [keras.layers.Dense(units, use_bias=False, name=f"dense_{units}") for units in (33, 65, 7)]
    model = keras.Sequential([keras.Input((15,)), *layers])
    model.compile("adam", "mse")
    return model


def test_products_of_an_mlp():
    """Forward 2 B N; backward as much for the weights, and as much for the inputs of all layers but the first."""
    weights = np.array([15 * 33, 33 * 65, 65 * 7])
    for rows in (2, 11):
        seconds = work_of(trace(mlp).traces).seconds(rows, COUNTS)
        assert seconds.forward[1:] == pytest.approx(2 * rows * weights)  # call 0 stands for what is before the first layer
        assert seconds.backward[1:] == pytest.approx(2 * rows * weights * [1, 2, 2])


def test_tensor_ranks_share_products():
    traced = trace(mlp)
    work, divided = work_of(traced.traces), np.array([one.type == "MatMul" for one in traced.traces[0].graph.get_operations()])
    whole, shared = (work.seconds(8, COUNTS, divided=one, ranks=4).forward.sum() for one in (None, divided))
    assert shared == pytest.approx(whole / 4)
    slow = dataclasses.replace(COUNTS, matmul={"float32": [(1.0, float("inf"))]}, bytes_per_second=1.0)
    times = [work.seconds(8, slow, divided=one, ranks=4).forward.sum() for one in (None, divided)]
    assert times[0] / 4 < times[1] < times[0]  # the loss of the whole outputs is computed on each


def test_what_moves_bytes_takes_their_time_and_each_operation_at_least_something():
    moves = dataclasses.replace(COUNTS, matmul={"float32": [(1.0, float("inf"))]}, bytes_per_second=4.0)
    work = work_of(trace(mlp).traces)
    seconds = work.seconds(8, moves)
    assert seconds.forward[2] == pytest.approx(8 * 33 + 33 * 65 + 8 * 65)  # reads x and the kernel, writes y
    counted = dataclasses.replace(moves, matmul={"float32": [(1.0, 1.0)]}, name="a CPU")
    flops = work.seconds(8, COUNTS).forward[2]
    assert work.seconds(8, counted).forward[2] == pytest.approx(seconds.forward[2] + flops)  # a GPU multiplies meanwhile
    assert work.seconds(8, dataclasses.replace(counted, name="a GPU")).forward[2] == pytest.approx(flops)
    slow = work.seconds(8, dataclasses.replace(moves, bytes_per_second=float("inf"), operation_seconds=3.0))
    assert slow.forward[1:3] == pytest.approx(3.0) and (slow.backward[1:] > 0).all()
    # A processor that starts an operation does not compute another meanwhile, as a GPU does; the smallest are not handed on.
    for name, rows, longer in (("a GPU", 1000, 0.0), ("a CPU", 1000, 5.0), ("a CPU", 8, 0.0)):
        alone, with_it = (
            work.seconds(rows, dataclasses.replace(moves, name=name, operation_seconds=one)).forward[2] for one in (0.0, 5.0)
        )
        assert with_it - alone == pytest.approx(longer)


def test_functions_take_their_time():
    functions = dataclasses.replace(COUNTS, matmul={"float32": [(1.0, float("inf"))]}, function_seconds=2.0)

    def build():
        x = inputs = keras.Input((6, 4))
        x = keras.layers.Softmax()(keras.layers.Activation("tanh")(keras.layers.Dense(4)(x)))
        model = keras.Model(inputs, x)
        model.compile("adam", "mse")
        return model

    seconds = work_of(trace(build).traces).seconds(3, functions).forward
    assert list(seconds[2:4]) == pytest.approx([2 * 3 * 6 * 4] * 2) and seconds[1] == 0


@pytest.mark.parametrize(
    ("equation", "shapes", "transposed"),
    [
        ("abc,cde->abde", ((2, 3, 4), (4, 5, 6)), ()),  # a projection to heads
        ("ba,bc->ac", ((3, 2), (3, 4)), ()),
        ("abc,cb->ba", ((5, 2, 3), (3, 2)), (0, 1)),  # b comes first in neither
        ("aecd,abcd->acbe", ((2, 3, 4, 5), (2, 6, 4, 5)), (0, 1, 2)),  # scores of attention: heads are behind the tokens
        ("acbe,aecd->abcd", ((2, 4, 6, 3), (2, 3, 4, 5)), (1, 2)),
    ],
)
def test_einsum_transposes_what_does_not_lie_as_matrices_do(equation, shapes, transposed):
    with tf.Graph().as_default():
        inputs = [tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes]
        operation = tf.raw_ops.Einsum(inputs=inputs, equation=equation).op
    tensors = [*operation.inputs, *operation.outputs]
    assert transposed_bytes(operation) == sum(2 * 4 * tensors[place].shape.num_elements() for place in transposed)


def blocks(count):
    class Block(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = [keras.layers.Dense(48, "relu"), keras.layers.Dense(16)]

        def build(self, shape):
            self.inner[0].build(shape)
            self.inner[1].build((*shape[:-1], 48))

        def call(self, x):
            return x + self.inner[1](self.inner[0](x))

    def build():
        x = inputs = keras.Input((16,))
        for place in range(count):
            x = Block(name=f"block_{place}")(x)
        return keras.Model(inputs, keras.layers.Dense(3)(x))

    return build


def test_equal_layers_count_each():
    """Of six four are traced; of three each."""
    six, three = (work_of(trace(blocks(count)).traces).seconds(8, COUNTS) for count in (6, 3))
    assert len(set(np.round(six.forward[1:7], 6))) == 1
    assert six.forward[1:7].sum() == pytest.approx(2 * three.forward[1:4].sum())
    assert six.backward[2:7].mean() == pytest.approx(three.backward[2:4].mean(), rel=0.1)


def test_a_block_that_is_computed_again_leaves_out_its_last_product():
    """Backward needs what the second product reads, and nobody what it makes: TensorFlow drops it."""
    seconds = work_of(trace(blocks(3)).traces).seconds(8, COUNTS)
    up = 2 * 8 * 16 * 48
    assert seconds.again[1:4] == pytest.approx(up) and seconds.forward[1:4] == pytest.approx(2 * up)


def test_convolutions_are_products():
    def build():
        return keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3, padding="same", use_bias=False)])

    seconds = work_of(trace(build).traces).seconds(2, COUNTS)
    flops = 2 * (2 * 8 * 8 * 4) * (3 * 3 * 3)
    assert (seconds.forward[1], seconds.backward[1]) == (pytest.approx(flops), pytest.approx(flops))
