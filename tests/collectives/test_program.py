"""Where collectives may be called, and ranks whose programs do not fit: refused while they are traced, never a hang."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from ranks import rank_id, refused, run, strategy_on, trace

from tfdist.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather_to_master_all_reduce,
    receive,
    reduce_scatter,
    send,
)

pytestmark = pytest.mark.timeout(120)

X = functools.partial(tf.ones, [4, 2])


OUTSIDE = r"was called outside `strategy\.run` of a tfdist strategy"
EVERY_OP = {
    "all_reduce": lambda: all_reduce(X()),
    "all_gather": lambda: all_gather(X()),
    "reduce_scatter": lambda: reduce_scatter(X()),
    "all_to_all": lambda: all_to_all(X()),
    "broadcast": lambda: broadcast(X()),
    "send": lambda: send(X(), 1),
    "receive": lambda: receive([4], tf.float32, 1),
    "gather_to_master_all_reduce": lambda: gather_to_master_all_reduce(X()),
}


@pytest.mark.parametrize("name", EVERY_OP)
def test_called_outside_run(name, cpus):
    call = EVERY_OP[name]
    with pytest.raises(RuntimeError, match=f"`{name}` {OUTSIDE}"):
        call()
    with pytest.raises(RuntimeError, match=OUTSIDE):
        tf.function(call, autograph=False)()
    with strategy_on(2).scope(), pytest.raises(RuntimeError, match=OUTSIDE):
        call()


def test_called_under_another_strategy(cpus):
    mirrored = tf.distribute.MirroredStrategy(cpus[:2])
    with pytest.raises(RuntimeError, match=OUTSIDE):
        trace(mirrored, EVERY_OP["all_reduce"])()


@pytest.mark.parametrize(
    "loop",
    [
        lambda: tf.while_loop(lambda x: tf.reduce_sum(x) < 9.0, lambda x: (all_reduce(x),), (X(),)),
        lambda: tf.while_loop(lambda x: tf.reduce_sum(all_reduce(x)) < 9.0, lambda x: (x + 1,), (X(),)),
        lambda: tf.map_fn(all_reduce, X()),
        lambda: tf.scan(lambda total, x: total + broadcast(x), X()),
        lambda: tf.while_loop(
            lambda x: tf.reduce_sum(x) < 9.0,
            lambda x: (tf.cond(x[0, 0] > 0.0, lambda: all_reduce(x), lambda: x),),
            (X(),),
        ),
    ],
)
def test_loops_of_one_rank(loop):
    refused(RuntimeError, r"was called in a loop .* Use a Python loop", loop)


@pytest.mark.parametrize(
    "disagreeing",
    [
        lambda: all_reduce(tf.ones([2 + rank_id()])),
        lambda: all_gather(tf.ones([2 + rank_id()])),
        lambda: all_reduce(tf.ones([2], (tf.float32, tf.float64)[rank_id()])),
        lambda: (all_reduce, all_gather)[rank_id()](X()),
        lambda: all_reduce(X(), label=f"rank_{rank_id()}"),
        lambda: receive([3], tf.float32, 0) if rank_id() else send(X(), 1),
        lambda: receive([3], tf.float32, 1 - rank_id()),
        lambda: send(X(), 1 - rank_id()),
        lambda: broadcast(X(), root=rank_id()),
        lambda: broadcast(X(), root=1 - rank_id()),
    ],
)
def test_ranks_that_disagree(disagreeing):
    text = refused(RuntimeError, r"Ranks disagree on collective 0 of group \[0, 1\]: rank 1 runs", disagreeing)
    assert "same order" in text
    assert "uneven=True" in text


def test_ranks_in_another_order():
    def rank():
        first, second = (all_reduce, broadcast) if rank_id() != 2 else (broadcast, all_reduce)
        return first(X()), second(X())

    refused(RuntimeError, "Ranks disagree on collective 0 .* rank 2 runs", rank, n=3)


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_a_rank_that_leaves_out_a_collective(lacking):
    def rank():
        x = all_reduce(X())
        return x if rank_id() == lacking else all_reduce(x, label="forgotten")

    refused(RuntimeError, f"different numbers of collectives.*Rank {lacking} lacks .*'forgotten'", rank, n=3)


def test_a_rank_that_leaves_out_the_gradient():
    def rank():
        x = X()
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(all_reduce(x))
        return tape.gradient(loss, x) if rank_id() == 0 else x

    refused(RuntimeError, "Rank 1 lacks .*'all_reduce/gradient'", rank)


def test_a_message_that_nobody_receives():
    refused(RuntimeError, r"group \[0, 1\].* Rank 1 lacks .*'send'", lambda: send(X(), 1) if rank_id() == 0 else X())


def test_a_refused_trace_leaves_the_strategy_usable():
    strategy = strategy_on(2)
    with pytest.raises(RuntimeError, match="disagree"):
        trace(strategy, lambda: all_reduce(tf.ones([1 + rank_id()])))()
    assert run(strategy, all_reduce, [np.float32(3)] * 2) == [6, 6]
