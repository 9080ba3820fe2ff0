"""Every collective against numpy, forward and backward, on 2, 3 and 4 ranks."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from ranks import integers, local, per_rank, rank_id, refused, run, strategy_on, trace, transposed

import tfdist
from tests.devices import names
from tfdist.collectives import (
    RING,
    Communicator,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    receive,
    reduce_scatter,
    send,
)
from tfdist.mesh import DeviceMesh

pytestmark = pytest.mark.timeout(120)

DTYPES = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
SIZES = (2, 3, 4)


# The references: a list of the ranks' arrays to the list of the ranks' results. All but max and min are linear.


def np_sum(xs):
    return [functools.reduce(np.add, xs)] * len(xs)


def np_mean(xs):
    return [total / len(xs) for total in np_sum(xs)]


def np_gather(xs):
    return [np.concatenate(xs)] * len(xs)


def np_scatter(xs):
    total, chunk = np_sum(xs)[0], -(-len(xs[0]) // len(xs))
    return [total[i * chunk : (i + 1) * chunk] for i in range(len(xs))]


def np_exchange(xs):
    blocks = [np.split(x, len(xs)) for x in xs]
    return [np.concatenate([block[i] for block in blocks]) for i in range(len(xs))]


def np_broadcast(xs, root):
    return [xs[root]] * len(xs)


def linear_cases(n):
    """Returns (name, operation, reference, input shape per rank) for `n` ranks."""
    same = [(5, 3)] * n
    cases = [
        ("sum", all_reduce, np_sum, same),
        ("sum of scalars", all_reduce, np_sum, [()] * n),
        ("gather", all_gather, np_gather, same),
        ("gather vectors", all_gather, np_gather, [(1,)] * n),
        ("gather uneven", functools.partial(all_gather, uneven=True), np_gather, [(i, 3) for i in range(n)]),
        (
            "gather uneven, last empty",
            functools.partial(all_gather, uneven=True),
            np_gather,
            [(5 * (n - 1 - i),) for i in range(n)],
        ),
        ("gather uneven, all empty", functools.partial(all_gather, uneven=True), np_gather, [(0, 2)] * n),
        (
            "gather uneven, no columns",
            functools.partial(all_gather, uneven=True),
            np_gather,
            [(i, 0) for i in range(n)],
        ),
        ("gather even as uneven", functools.partial(all_gather, uneven=True), np_gather, same),
        ("scatter", reduce_scatter, np_scatter, [(2 * n, 3)] * n),
        ("scatter uneven", reduce_scatter, np_scatter, [(2 * n + 1, 3)] * n),
        ("scatter one row less", reduce_scatter, np_scatter, [(2 * n - 1,)] * n),
        ("scatter fewer rows than ranks", reduce_scatter, np_scatter, [(n - 1, 2)] * n),
        ("scatter one row", reduce_scatter, np_scatter, [(1, 3, 2)] * n),
        ("exchange", all_to_all, np_exchange, [(n, 3)] * n),
        ("exchange blocks", all_to_all, np_exchange, [(2 * n,)] * n),
    ]
    for root in range(n):
        reference = functools.partial(np_broadcast, root=root)
        cases.append((f"broadcast from {root}", functools.partial(broadcast, root=root), reference, [(2, 3)] * n))
    for name, operation, reference in [
        ("sum", all_reduce, np_sum),
        ("gather", all_gather, np_gather),
        ("scatter", reduce_scatter, np_scatter),
        ("exchange", all_to_all, np_exchange),
        ("broadcast", broadcast, functools.partial(np_broadcast, root=0)),
    ]:
        cases.append((f"{name} nothing", operation, reference, [(0, 3)] * n))
        cases.append((f"{name} no columns", operation, reference, [(n, 0)] * n))
    return cases


EVERY_DTYPE = ("sum", "gather", "gather uneven", "scatter uneven", "exchange blocks", "broadcast from 1")


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_forward(n, dtype):
    rng = np.random.default_rng(n)
    cases = linear_cases(n)
    if dtype != tf.float32:  # shapes do not depend on dtypes
        cases = [case for case in cases if case[0] in EVERY_DTYPE]
    for reduce_op, ufunc in [("max", np.maximum), ("min", np.minimum)]:
        reference = lambda xs, ufunc=ufunc: [functools.reduce(ufunc, xs)] * len(xs)  # noqa: E731
        cases.append((reduce_op, functools.partial(all_reduce, reduce_op=reduce_op), reference, [(4, 3)] * n))
    values = {name: [integers(rng, shape, dtype) for shape in shapes] for name, _, _, shapes in cases}

    def rank(x):
        return {name: operation(x[name]) for name, operation, _, _ in cases}

    results = run(strategy_on(n), rank, transposed(values))
    for name, _, reference, _ in cases:
        for index, expected in enumerate(reference(values[name])):
            actual = results[index][name]
            assert actual.dtype == dtype.as_numpy_dtype, name
            assert actual.shape == expected.shape, f"{name} on rank {index}"
            np.testing.assert_array_equal(actual, expected, err_msg=f"{name} on rank {index}")


@pytest.mark.parametrize("n", SIZES)
def test_mean(n):
    floats = DTYPES[:4]
    values = {dtype.name: [np.full((3,), 4 * i, dtype.as_numpy_dtype) for i in range(n)] for dtype in floats}

    def rank(x):
        return {name: all_reduce(value, reduce_op="mean") for name, value in x.items()}

    for result in run(strategy_on(n), rank, transposed(values)):
        for name, value in result.items():
            np.testing.assert_array_equal(value.astype("float64"), [2.0 * (n - 1)] * 3, err_msg=name)


@pytest.mark.parametrize("n", [exhaustive(2), 3, exhaustive(4)])
def test_gradients_are_adjoint(n):
    """<A x, y> = <x, A^T y>, summed over the ranks, for more x than there are dimensions: that fixes A^T y entirely."""
    rng = np.random.default_rng(n)
    cases = linear_cases(n)
    cases.append(("mean", functools.partial(all_reduce, reduce_op="mean"), np_mean, [(5, 3)] * n))
    x = {name: [rng.normal(size=shape) for shape in shapes] for name, _, _, shapes in cases}
    y = {name: [rng.normal(size=out.shape) for out in reference(x[name])] for name, _, reference, _ in cases}

    def rank(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.add_n([tf.reduce_sum(operation(x[name]) * y[name]) for name, operation, _, _ in cases])
        return tape.gradient(loss, x)

    gradients = run(strategy_on(n), rank, transposed(x), transposed(y))
    for name, _, reference, shapes in cases:
        mine = [gradients[index][name] for index in range(n)]
        assert [gradient.shape for gradient in mine] == shapes, name
        for _ in range(1 + sum(gradient.size for gradient in mine)):
            probe = [rng.normal(size=shape) for shape in shapes]
            forward = sum(np.vdot(out, weight) for out, weight in zip(reference(probe), y[name], strict=True))
            backward = sum(np.vdot(one, gradient) for one, gradient in zip(probe, mine, strict=True))
            assert backward == pytest.approx(forward, rel=1e-9, abs=1e-9), name


def test_second_order():
    """f = sum_i (sum_j x_j)^2 / 2 has gradient N s on every rank, whose sum of squares has gradient 2 N^3 s there."""
    values = [np.array([float(1 + i)]) for i in range(3)]

    def rank(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(all_reduce(x) ** 2) / 2
            gradient = inner.gradient(loss, x)
            norm = tf.reduce_sum(gradient**2)
        return gradient, outer.gradient(norm, x)

    for first, second in run(strategy_on(3), rank, values):
        np.testing.assert_allclose(first, [3 * 6.0])
        np.testing.assert_allclose(second, [2 * 27 * 6.0])


def test_lengths_known_at_run_time_only():
    """One trace, many lengths: each power of two is a key of its own, or the second call would poison the process."""
    strategy = strategy_on(3)

    def rank(length, weight):
        x = tf.range(1.0, 10.0)[:length] * tf.ones([2, 1])
        x = tf.transpose(x) * weight
        with tf.GradientTape() as tape:
            tape.watch(x)
            gathered = all_gather(x)
            loss = tf.reduce_sum(tf.cumsum(gathered) * weight)
        return gathered, tape.gradient(loss, x)

    step = trace(strategy, rank)
    weights = [np.float32(1 + i) for i in range(3)]
    for lengths in [(1, 2, 3), (5, 0, 9), (0, 0, 0), (9, 9, 9), (0, 1, 0), (1, 2, 3)]:
        arguments = [per_rank(strategy, [np.int32(length) for length in lengths]), per_rank(strategy, weights)]
        results = local(strategy, step(*arguments))
        inputs = [np.arange(1.0, 1 + m)[:, None] * np.ones(2) * w for m, w in zip(lengths, weights, strict=True)]
        rows, start = sum(lengths), 0
        for (gathered, gradient), length in zip(results, lengths, strict=True):
            np.testing.assert_array_equal(gathered, np.concatenate(inputs))
            below = rows - start - np.arange(length)  # the cumulative sums in which a row appears
            np.testing.assert_array_equal(gradient, np.stack([below * sum(weights)] * 2, axis=1))
            start += length
    assert step.experimental_get_tracing_count() == 1


def test_half_precision_is_summed_in_single():
    """40000 + 40000 is past the end of float16; 256 + 1 + 1 + 1 is 256 when added in bfloat16 one by one."""
    halves = [np.full((4,), value, np.float16) for value in (40000, 40000, -40000, 24)]
    brains = [np.full((4,), value, tf.bfloat16.as_numpy_dtype) for value in (256, 1, 1, 0)]
    results = run(strategy_on(4), lambda x, y: (reduce_scatter(x), reduce_scatter(y)), halves, brains)
    assert [float(half[0]) for half, _ in results] == [float(np.float16(40024))] * 4
    assert [float(brain[0]) for _, brain in results] == [258.0] * 4


# Groups


def test_a_group_of_one_emits_nothing():
    strategy = strategy_on(1)
    x = np.arange(12.0).reshape(4, 3)

    def rank(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            results = [
                all_reduce(x),
                all_reduce(x, reduce_op="mean"),
                all_gather(x),
                all_gather(x, uneven=True),
                reduce_scatter(x),
                all_to_all(x),
                broadcast(x),
            ]
        return results, tape.gradient(results, x)

    ((results, gradient),) = run(strategy, rank, [x])
    for result in results:
        np.testing.assert_array_equal(result, x)
    np.testing.assert_array_equal(gradient, np.full_like(x, len(results)))
    assert strategy.last_plan.records == [[]]


def test_empty_tensors_emit_nothing():
    strategy = strategy_on(3)

    def rank():
        x = tf.zeros([0, 2])
        if rank_id() == 0:
            send(x, 1)
        if rank_id() == 1:
            assert receive([0, 2], tf.float32, 0).shape == [0, 2]
        return all_reduce(x), all_gather(x), reduce_scatter(x), all_to_all(x), broadcast(x, root=2)

    for results in run(strategy, rank):
        assert [result.shape for result in results] == [(0, 2)] * 5
    assert strategy.last_plan.records == [[], [], []]


@pytest.mark.parametrize(("shape", "axes"), [((2, 1, 2), ("data", "tensor")), ((1, 2, 2), ("pipe", "tensor"))])
def test_axes_of_a_mesh(cpus, shape, axes):
    strategy = tfdist.ShardedStrategy(cpus)
    mesh = DeviceMesh(strategy.mesh.devices, pipeline_parallel_size=shape[1], tensor_parallel_size=shape[2])
    strategy.extended.communicator = Communicator(mesh, RING)

    def rank(x):
        return {axis: all_gather(x, axis) for axis in ("data", "pipe", "tensor")}

    results = run(strategy, rank, [np.array([float(i)]) for i in range(4)])
    for index, gathered in enumerate(results):
        for axis in ("data", "pipe", "tensor"):
            np.testing.assert_array_equal(gathered[axis], mesh.group_ranks(axis, index))
    assert [len(records) for records in strategy.last_plan.records] == [len(axes)] * 4


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (2, 0, 3, 1)])
def test_devices_in_any_order(order):
    """Rank i is the i-th device named, whatever number the kernels give it."""
    n = 4
    strategy = tfdist.ShardedStrategy([names(n)[index] for index in order])
    cases = [case for case in linear_cases(n) if "uneven" not in case[0] or case[0] == "gather uneven"]
    rng = np.random.default_rng(0)
    values = {name: [integers(rng, shape) for shape in shapes] for name, _, _, shapes in cases}

    def rank(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            results = {name: operation(x[name]) for name, operation, _, _ in cases}
            loss = tf.reduce_sum(tf.cumsum(results["gather"]) * x["gather"][0, 0])
        return results, tape.gradient(loss, x["gather"])

    results = run(strategy, rank, transposed(values))
    for name, _, reference, _ in cases:
        for index, expected in enumerate(reference(values[name])):
            np.testing.assert_array_equal(results[index][0][name], expected, err_msg=f"{name} on rank {index}")
    # Not symmetric in the ranks, so that rows of another rank would show.
    firsts = sum(x[0, 0] for x in values["gather"])
    for index, (_, gradient) in enumerate(results):
        below = 20 - 5 * index - np.arange(5)
        own = np.zeros((5, 3))
        own[0, 0] = np.cumsum(np.concatenate(values["gather"]), axis=0).sum()
        np.testing.assert_allclose(gradient, firsts * below[:, None] * np.ones(3) + own)


def test_a_result_that_only_one_rank_reads():
    def rank(x):
        total = all_reduce(x)
        sent = broadcast(x, root=1)
        return total + sent if rank_id() == 0 else x

    results = run(strategy_on(3), rank, [np.array([1.0 + i]) for i in range(3)])
    assert [result.tolist() for result in results] == [[6.0 + 2.0], [2.0], [3.0]]


def test_two_strategies_in_one_process():
    for _ in range(2):
        one, other = strategy_on(2), strategy_on(3)
        for strategy in (one, other, one):
            size = strategy.mesh.world_size
            assert run(strategy, all_reduce, [np.float32(1)] * size) == [size] * size


def test_a_loop_around_the_ranks():
    strategy = strategy_on(3)

    @tf.function(autograph=False)
    def steps(x):
        return tf.while_loop(
            lambda i, _: i < 4,
            lambda i, x: (i + 1, strategy.reduce("MEAN", strategy.run(all_reduce, args=(x,)), axis=None)),
            (0, x),
        )[1]

    assert float(steps(tf.constant(1.0))) == 3.0**4


def test_branches_that_the_ranks_agree_on():
    strategy = strategy_on(3)

    def rank(flag, x):
        return tf.cond(flag, lambda: all_reduce(x), lambda: -x)

    step = trace(strategy, rank)
    x = per_rank(strategy, [np.float32(1 + i) for i in range(3)])
    assert local(strategy, step(tf.constant(True), x)) == [6.0, 6.0, 6.0]
    assert local(strategy, step(tf.constant(False), x)) == [-1.0, -2.0, -3.0]


# Errors: all while tracing


X = functools.partial(tf.ones, [4, 2])


@pytest.mark.parametrize(
    ("match", "received", "function"),
    [
        ("`all_reduce` carries", "dtype='bool'", lambda: all_reduce(X(tf.bool))),
        ("`all_gather` carries", "dtype='complex64'", lambda: all_gather(X(tf.complex64))),
        ("`reduce_scatter` carries", "dtype='string'", lambda: reduce_scatter(tf.constant(["a"]))),
        ("`all_to_all` carries", "dtype='int8'", lambda: all_to_all(X(tf.int8))),
        ("`broadcast` carries", "dtype='bool'", lambda: broadcast(X(tf.bool))),
        ("`send` carries", "dtype='bool'", lambda: send(X(tf.bool), 1 - rank_id())),
        ("`receive` carries", "dtype='bool'", lambda: receive([4], tf.bool, 1 - rank_id())),
        ("`mesh_axis` must be one of", "mesh_axis='model'", lambda: all_reduce(X(), "model")),
        ("`mesh_axis` must be one of", "mesh_axis='model'", lambda: send(X(), 0, "model")),
        ("`reduce_op` must be one of", "reduce_op='product'", lambda: all_reduce(X(), reduce_op="product")),
        ('`reduce_op="mean"` needs a floating', "dtype='int32'", lambda: all_reduce(X(tf.int32), reduce_op="mean")),
        (r"`root` must be an index in the group, \[0, 2\)", "root=2", lambda: broadcast(X(), root=2)),
        ("`root` must be an index", "root=-1", lambda: broadcast(X(), root=-1)),
        ("`destination` must be another member", "destination=2", lambda: send(X(), 2)),
        ("`destination` must be another member", "destination=0", lambda: send(X(), 0)),
        ("`source` must be another member", "source=0", lambda: receive([4], tf.float32, 0)),
        ("`source` must be another member", "source=-1", lambda: receive([4], tf.float32, -1)),
        ("`receive` needs a static", r"shape=TensorShape\(\[None\]\)", lambda: receive([None], tf.float32, 1)),
        ("`all_gather` cuts or joins axis 0", r"shape=TensorShape\(\[\]\)", lambda: all_gather(tf.constant(1.0))),
        ("`reduce_scatter` cuts or joins axis 0", "shape=", lambda: reduce_scatter(tf.constant(1.0))),
        ("`all_to_all` cuts or joins axis 0", "shape=", lambda: all_to_all(tf.constant(1.0))),
        ("multiple of the group's size, 2", r"shape=\(3,\)", lambda: all_to_all(tf.ones([3]))),
    ],
)
def test_values_refused(match, received, function):
    refused(ValueError, f"(?s){match}.*Received: .*{received}", function)


@pytest.mark.parametrize("operation", [all_reduce, reduce_scatter, all_to_all, broadcast, lambda x: send(x, 1 - rank_id())])
def test_shapes_known_at_run_time_only_are_refused(operation):
    strategy = strategy_on(2)
    with pytest.raises(ValueError, match=r"needs (a )?static .*Received: shape=TensorShape\(\[None, 2\]\)"):
        trace(strategy, operation).get_concrete_function(tf.TensorSpec([None, 2]))


def test_inner_dimensions_must_be_static():
    with pytest.raises(ValueError, match="needs static dimensions after axis 0"):
        trace(strategy_on(2), all_gather).get_concrete_function(tf.TensorSpec([2, None]))


@pytest.mark.parametrize("reduce_op", ["max", "min"])
def test_max_and_min_have_no_gradient(reduce_op):
    def rank():
        x = X()
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = all_reduce(x, reduce_op=reduce_op)
        return tape.gradient(loss, x)

    refused(NotImplementedError, f"gradient for sums and means only.*reduce_op='{reduce_op}'", rank)
