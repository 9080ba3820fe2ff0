"""The borders of a sharded region: what each does forward and backward, on sizes that are known and that are not."""

import numpy as np
import pytest
import tensorflow as tf
from ranks import local, rank_id, strategy_on, trace

from tfdist.extensions.tensor import regions

RNG = np.random.default_rng(4)


def through(strategy, border, whole_inputs, rows, **arguments):
    """Returns each rank's output of `border`, and the gradient of its input for an upstream of its own, as lists by rank."""
    size = strategy.mesh.tensor_parallel_size

    def on_rank(number):
        x = tf.constant(whole_inputs)[rank_id() % size]
        if rows == "unknown":
            x = tf.ensure_shape(x[:number], [None, *x.shape[1:]])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = border(x, **arguments)
            upstream = (rank_id() % size + 1) * tf.reshape(tf.range(1, 1 + tf.size(y)), tf.shape(y))
            weighted = tf.reduce_sum(y * tf.cast(upstream, y.dtype))
        return y, tape.gradient(weighted, x)

    number = tf.constant(whole_inputs.shape[1])
    return list(zip(*local(strategy, trace(strategy, lambda: on_rank(number))()), strict=True))


def upstreams(shapes):
    """The gradient that `through` gives each rank's output."""
    return [(rank + 1) * np.arange(1, 1 + np.prod(shape)).reshape(shape) for rank, shape in enumerate(shapes)]


def parts(x, size, axis):
    return np.split(x, size, axis)


CASES = {
    # border: (arguments, forward of all ranks' inputs, backward of all ranks' upstreams)
    "copy_to": ({}, lambda xs, n: xs, lambda us, n: [sum(us)] * n),
    "reduce_from": ({}, lambda xs, n: [sum(xs)] * n, lambda us, n: us),
    "gather_from": (
        {"axis": -1},
        lambda xs, n: [np.concatenate(xs, -1)] * n,
        lambda us, n: [parts(u, n, -1)[rank] for rank, u in enumerate(us)],
    ),
    "scatter_to": (
        {"axis": -1},
        lambda xs, n: [parts(x, n, -1)[rank] for rank, x in enumerate(xs)],
        lambda us, n: [np.concatenate(us, -1)] * n,
    ),
    "gather_for_region": (
        {"axis": 1},
        lambda xs, n: [np.concatenate(xs, 1)] * n,
        lambda us, n: parts(sum(us), n, 1),
    ),
    "reduce_scatter_from": (
        {"axis": 1},
        lambda xs, n: parts(sum(xs), n, 1),
        lambda us, n: [np.concatenate(us, 1)] * n,
    ),
}


@pytest.mark.parametrize("rows", ["known", "unknown"])
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_both_directions(name, devices, rows):
    arguments, forward, backward = CASES[name]
    inputs = RNG.integers(-5, 6, (devices, 5, 4, 8)).astype("int32")  # integers: exact
    strategy = strategy_on(devices, tensor_parallel_size=devices)
    outputs, gradients = through(strategy, getattr(regions, name), inputs.astype("float64"), rows, **arguments)
    expected = forward(list(inputs), devices)
    for rank in range(devices):
        np.testing.assert_array_equal(outputs[rank], expected[rank])
    for rank, gradient in enumerate(backward(upstreams([y.shape for y in expected]), devices)):
        np.testing.assert_array_equal(gradients[rank], gradient)


def test_no_rows_on_any_rank():
    strategy = strategy_on(2, tensor_parallel_size=2)

    def on_rank(number):
        x = tf.ensure_shape(tf.ones([3, 4])[:number], [None, 4])
        return regions.reduce_from(x), regions.gather_from(x), regions.reduce_scatter_from(x, axis=1)

    for reduced, gathered, part in local(strategy, trace(strategy, on_rank)(tf.constant(0))):
        assert (reduced.shape, gathered.shape, part.shape) == ((0, 4), (0, 8), (0, 2))


def test_a_tensor_enters_once():
    strategy = strategy_on(2, tensor_parallel_size=2)

    def on_rank():
        x = tf.ones([2, 3])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = regions.copy_to(x) * 2.0 + regions.copy_to(x) * tf.cast(rank_id(), tf.float32)
        return tape.gradient(y, x)

    results = local(strategy, trace(strategy, on_rank)())
    assert strategy.last_plan.counts() == {"all_reduce": 1}
    for gradient in results:
        np.testing.assert_array_equal(gradient, np.full([2, 3], 5.0))  # 2 + 0 + 2 + 1


def test_a_tape_that_was_opened_since_sees_it_too():
    strategy = strategy_on(2, tensor_parallel_size=2)

    def on_rank():
        x = tf.ones([3])
        regions.copy_to(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = 3.0 * regions.copy_to(x)
        return tape.gradient(y, x)

    for gradient in local(strategy, trace(strategy, on_rank)()):
        np.testing.assert_array_equal(gradient, np.full([3], 6.0))


@pytest.mark.parametrize("tensor", [1, 2])
def test_without_ranks_that_share_a_layer_nothing_happens(tensor):
    x = tf.ones([2, 4])
    strategy = strategy_on(2, tensor_parallel_size=tensor)
    with strategy.scope():
        for name, (arguments, _, _) in CASES.items():
            assert getattr(regions, name)(x, **arguments) is x
    if tensor == 1:
        trace(strategy, lambda: regions.reduce_from(tf.ones([2])))()
        assert strategy.last_plan.counts() == {}


def test_a_size_that_cannot_be_cut():
    strategy = strategy_on(2, tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"Axis 1 .* 2 ranks do not divide 5.*4, 6"):
        trace(strategy, lambda: regions.scatter_to(tf.ones([3, 5])))()
