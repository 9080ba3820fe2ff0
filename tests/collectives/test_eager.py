"""Collectives in an eager `strategy.run`: what they give when traced, values and gradients, and errors instead of a wait."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from ranks import local, per_rank, rank_id, run, strategy_on

from tfdist.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    current_program,
    receive,
    reduce_scatter,
    send,
)

pytestmark = pytest.mark.timeout(120)


def run_eagerly(strategy, function, *values):
    return local(strategy, strategy.run(function, args=tuple(per_rank(strategy, value) for value in values)))


def passed_on(x):
    """Rank 0 sends to rank 1 and gets a gradient back; a third rank waits while the group of two meets."""
    if rank_id() == 0:
        return x + send(x, 1)
    return receive(x.shape, x.dtype, 0, anchor=x[0]) if rank_id() == 1 else x


def in_loops(x):
    """Python runs eager loops: collectives may stand in them."""
    for _ in tf.range(2):
        x = all_reduce(x) / 2
    return tf.while_loop(lambda x: tf.reduce_max(x) < 1e3, lambda x: (all_reduce(x),), (tf.abs(x) + 1,))[0]


OPS = {
    "all_reduce": all_reduce,
    "mean": functools.partial(all_reduce, reduce_op="mean"),
    "max": lambda x: all_reduce(tf.stop_gradient(x), reduce_op="max") * x,
    "all_gather": lambda x: all_gather(x) * tf.range(1.0, 1 + x.shape[0] * current_program().mesh.world_size),
    "reduce_scatter": reduce_scatter,
    "all_to_all": lambda x: all_to_all(x) * (1.0 + rank_id()),
    "broadcast": lambda x: broadcast(x, root=1) * (1.0 + rank_id()),
    "two in a row": lambda x: all_reduce(all_to_all(x) ** 2),
    "send and receive": passed_on,
}


def with_gradient(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
        loss = tf.reduce_sum(y**2)
    return y, tape.gradient(loss, x)


NEED_A_SECOND_RANK = ("broadcast", "send and receive")


@pytest.mark.parametrize(("name", "n"), [(name, n) for name in OPS for n in (1, 2, 3) if n > 1 or name not in NEED_A_SECOND_RANK])
def test_as_when_traced(name, n):
    strategy = strategy_on(n)
    rng = np.random.default_rng(0)
    x = [rng.normal(size=6).astype("float32") for _ in range(n)]
    function = functools.partial(with_gradient, OPS[name])
    traced = run(strategy, function, x)
    plan = strategy.last_plan
    eager = run_eagerly(strategy, function, x)
    for mine, theirs in zip(eager, traced, strict=True):
        np.testing.assert_allclose(mine[0], theirs[0], rtol=1e-6)
        np.testing.assert_allclose(mine[1], theirs[1], rtol=1e-6)
    if "all_gather" not in plan.counts():  # eagerly the lengths are exchanged first
        assert strategy.last_plan.counts() == plan.counts()


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int32"])
def test_dtypes(dtype):
    strategy = strategy_on(2)
    x = [tf.cast(tf.range(4) + rank, dtype) for rank in range(2)]
    for function in (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast):
        eager, traced = run_eagerly(strategy, function, x), run(strategy, function, x)
        for mine, theirs in zip(eager, traced, strict=True):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)


def test_different_lengths_need_no_word():
    """What is a dynamic shape in a graph is a number in eager code, another on each rank; none at all on the last."""
    strategy = strategy_on(3)
    results = run_eagerly(strategy, lambda: all_gather(tf.fill([2 - rank_id(), 2], float(rank_id()))))
    for result in results:
        np.testing.assert_array_equal(result[:, 0], [0, 0, 1])


def test_loops():
    (first, second) = run_eagerly(strategy_on(2), in_loops, [np.float32([1, 2]), np.float32([3, 4])])
    np.testing.assert_array_equal(first, second)
    assert first.max() > 1e3


def refused(match, function, n=2):
    strategy = strategy_on(n)
    with pytest.raises(RuntimeError, match=match):
        strategy.run(function)
    assert run_eagerly(strategy, all_reduce, [np.float32(1)] * n) == [n] * n  # and the strategy can be used again


X = functools.partial(tf.ones, [4])


@pytest.mark.parametrize(
    "disagreeing",
    [
        lambda: all_reduce(tf.ones([2 + rank_id()])),
        lambda: (all_reduce, broadcast)[rank_id()](X()),
        lambda: all_reduce(X(), label=f"rank_{rank_id()}"),
        lambda: send(X(), 1 - rank_id()),
    ],
)
def test_ranks_that_disagree(disagreeing):
    refused("Ranks disagree on collective 0", disagreeing)


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_a_rank_that_leaves_out_a_collective(lacking):
    refused("wait for each other in vain.*forgotten", lambda: rank_id() == lacking or all_reduce(X(), label="forgotten"), 3)


def test_an_error_of_one_rank_is_raised():
    strategy = strategy_on(2)

    def fail():
        x = all_reduce(X())
        if rank_id() == 1:
            raise KeyError("mine")
        return all_reduce(x)

    with pytest.raises(KeyError, match="mine"):
        strategy.run(fail)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_in_a_compiled_function_of_an_eager_rank(name):
    refused("Eager ranks meet in Python", lambda: tf.function(OPS[name], autograph=False, jit_compile=True)(X()))
