"""FLOPs of graphs, by hand."""

import pytest
import tensorflow as tf

from tfdist.extensions.pipeline.stages.flops import UNKNOWN_SIZE, elements, flops_of


def counted(function, *shapes):
    specs = [tf.TensorSpec(shape) for shape in shapes]
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return flops_of(graph.outputs, graph.get_operations())


def test_elements():
    assert elements((3, 5)) == elements(tf.TensorShape((3, 5))) == 15
    assert elements(()) == 1
    assert elements((2, None)) == 2 * UNKNOWN_SIZE
    assert elements(tf.TensorShape(None)) == UNKNOWN_SIZE


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
def test_products(left, right):
    a, b = ((5, 3) if left else (3, 5)), ((7, 5) if right else (5, 7))
    assert counted(lambda a, b: tf.matmul(a, b, left, right), a, b) == 2 * 3 * 5 * 7
    assert counted(lambda a, b: tf.matmul(a, b, left, right), (2, *a), (2, *b)) == 2 * 2 * 3 * 5 * 7


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("ab,bc->ac", [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
        ("btnh,bsnh->bnts", [(2, 3, 4, 5), (2, 6, 4, 5)], 2 * 2 * 3 * 6 * 4 * 5),
        ("...ij,...jk->...ik", [(2, 4, 3, 5), (2, 4, 5, 7)], 2 * 8 * 3 * 5 * 7),
        ("...i,ij->...j", [(2, 4, 3), (3, 5)], 2 * 8 * 3 * 5),
        ("ij->j", [(3, 5)], 15),
    ],
)
def test_einsum(equation, shapes, expected):
    assert counted(lambda *x: tf.einsum(equation, *x), *shapes) == expected


def test_what_moves_costs_nothing_and_the_rest_its_outputs():
    assert counted(lambda x: tf.gather(tf.transpose(tf.reshape(x, (3, 4))), [1, 1]), (2, 6)) == 0
    assert counted(lambda x: tf.concat([x, tf.zeros((3, 4))], 0), (3, 4)) == 0
    assert counted(lambda x: tf.tanh(x) * 2, (3, 4)) == 24
    assert counted(lambda x: tf.argmax(x), (3, 4)) == 0


def test_only_what_the_outputs_need_counts():
    def function(x):
        tf.tanh(x)
        return tf.exp(x)

    assert counted(function, (3, 4)) == 12


def test_loops():
    def known(x):
        return tf.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, tf.tanh(x)), (0, x), maximum_iterations=5)[1]

    def unknown(x):
        return tf.while_loop(lambda x: tf.reduce_sum(x) < 5, lambda x: (tf.tanh(x),), (x,))

    def over_steps(x):
        return tf.map_fn(lambda row: tf.map_fn(tf.tanh, row), x)

    assert counted(known, (3,)) == 5 * 3
    assert counted(unknown, (3,)) == UNKNOWN_SIZE * 3
    assert counted(over_steps, (6, 4)) == 24
    assert counted(over_steps, (None, 4)) == UNKNOWN_SIZE * 4


def test_functions_and_branches():
    inner = tf.function(tf.tanh, autograph=False)
    outer = tf.function(lambda x: inner(x) + inner(x), autograph=False)
    assert counted(outer, (3,)) == 9

    def branch(x):
        return tf.cond(x[0] > 0, lambda: inner(x), lambda: tf.tanh(tf.exp(x)))

    assert counted(branch, (3,)) == 6
    assert counted(lambda x: tf.switch_case(tf.cast(x[0], tf.int32), [lambda: x, lambda: tf.tanh(x)]), (3,)) == 3


def test_gradients_of_convolutions_cost_what_they_do_forward():
    def backward(x, kernel, op):
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = op(x, kernel, 1, "SAME") if op is tf.nn.conv2d else op(x, kernel, [1, 1, 1, 1], "SAME")
        return tape.gradient(y, [x, kernel], tf.ones_like(y))

    dense, depthwise = 2 * (2 * 6 * 6 * 5) * (3 * 3 * 4), 2 * (2 * 6 * 6 * 8) * (3 * 3)
    assert counted(lambda x, k: backward(x, k, tf.nn.conv2d), (2, 6, 6, 4), (3, 3, 4, 5)) == 2 * dense
    found = counted(lambda x, k: backward(x, k, tf.nn.depthwise_conv2d), (2, 6, 6, 4), (3, 3, 4, 2))
    assert found == 2 * depthwise


def test_cudnn():
    def lstm(x, state, parameters):
        return tf.raw_ops.CudnnRNN(input=x, input_h=state, input_c=state, params=parameters, rnn_mode="lstm")[0]

    assert counted(lstm, (6, 1, 5), (1, 1, 3), (120,)) == 2 * 6 * 120
