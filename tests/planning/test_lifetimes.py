"""How long tensors are there: the executor's order, buffers that are taken over, shared, and kept; loops."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.planning.execution_order import execution_order
from tfdist.planning.lifetimes import Sweep

MEGABYTE = 2**20
ROW = 2**18  # float32: a megabyte


def swept(function, *specs, batch_sizes=(2, 4)):
    """Returns the sweep of a function of `rows` vectors of a megabyte, traced for two sizes."""
    traces = []
    for size in batch_sizes:
        given = [tf.TensorSpec((size, ROW)) for _ in specs]
        traces.append(tf.function(function, autograph=False).get_concrete_function(*given))
    return Sweep([one.graph for one in traces], batch_sizes, [one.name for one in traces[0].graph.outputs])


def test_one_thread_runs_what_is_cheap_at_once_and_the_latest_of_what_is_expensive_first():
    #      0 ── 1 (cheap)       0 makes 1, 2, 3 ready: 1 runs in its thread, 2 and 3 go to the pool, the latest in front
    #      ├─── 2
    #      └─── 3
    before, runs = [[], [0], [0], [0]], [True] * 4
    order, ends = execution_order(before, runs, [False, True, False, False], [1.0] * 4, threads=1)
    assert order == [0, 1, 3, 2] and ends == [0, 1, 2, 3]


def test_two_threads_run_side_by_side():
    order, ends = execution_order([[], [], [0, 1]], [True] * 3, [False] * 3, [1.0, 3.0, 1.0], threads=2)
    assert order == [0, 1, 2] and ends == [1, 1, 2]
    # What travels holds no thread: 2 begins beside it on the only one.
    order, ends = execution_order([[], [], [0]], [True] * 3, [False] * 3, [5.0, 1.0, 1.0], travels={0}, threads=1)
    assert order == [0, 1, 2] and ends == [1, 1, 2]
    skipped, _ = execution_order([[], [], [0]], [True, False, True], [False] * 3, [1.0] * 3)
    assert skipped == [0, 2]


def test_of_two_that_take_as_long_either_may_end_first():
    #      0 ── 1 ── 3      what 1 reads is there when 2 has ended and 4 begins, and what 2 reads when 3 begins
    #      └─── 2 ── 4
    before, seconds = [[], [0], [0], [1], [2]], [1.0, 10.0, 10.0, 1.0, 1.0]
    order, ends = execution_order(before, [True] * 5, [False] * 5, seconds, threads=2)
    ends_of = dict(zip(order, ends, strict=True))
    assert ends_of[1] >= order.index(4) and ends_of[2] >= order.index(3)
    longer = execution_order(before, [True] * 5, [False] * 5, [1.0, 10.0, 12.0, 1.0, 1.0], threads=2)
    ends_of = dict(zip(*longer, strict=True))
    assert ends_of[1] < longer[0].index(4) and ends_of[2] >= longer[0].index(3)


def test_elementwise_operations_write_into_dying_inputs():
    def chain(x):
        return tf.nn.relu(tf.exp(tf.matmul(x, x, transpose_b=True) @ x))

    sweep = swept(chain, "x")
    live = sweep.at(8).live()
    assert 8 * MEGABYTE <= live.max() < 8.1 * MEGABYTE  # of the last product, exp and ReLU one buffer
    assert sweep.at(16).live().max() >= 16 * MEGABYTE
    assert sweep.unknown == 0


def test_what_is_read_later_is_not_overwritten():
    def both(x):
        y = tf.transpose(x)
        return tf.exp(y) + tf.sin(y) * y

    live = swept(both, "x").at(4).live()
    assert 2 * 4 * MEGABYTE < live.max() <= 3 * 4 * MEGABYTE


def test_views_share_their_buffer():
    def views(x):
        return tf.reshape(tf.identity(tf.transpose(x)), [-1])

    buffers = swept(views, "x").at(4)
    assert buffers.live().max() < 4.1 * MEGABYTE
    assert (buffers.sizes >= MEGABYTE).sum() == 1


def test_loops_keep_what_each_trip_adds():
    def loop(x):
        def body(step, total, kept):
            total = tf.tanh(total)
            return step + 1, total, kept.write(step, total)

        kept = tf.TensorArray(tf.float32, 6, element_shape=x.shape)
        return tf.while_loop(lambda step, *_: step < 6, body, (0, x, kept), maximum_iterations=6)[2].stack()

    sweep = swept(loop, "x")
    assert 2 * 6 * 2 * MEGABYTE <= sweep.at(2).live().max() <= 2.7 * 6 * 2 * MEGABYTE  # the list, and what stacks it


@pytest.mark.parametrize("is_returned", [False, True])
def test_loops_keep_for_their_gradient_what_a_trip_hands_to_the_next(is_returned):
    """Each trip's total is read by the gradient of the next trip's product. It is one tensor, though two lists may have it."""

    def gradient(x):
        def body(step, total, kept):
            total = total * x
            return step + 1, total, kept.write(step, total) if is_returned else kept

        with tf.GradientTape() as tape:
            tape.watch(x)
            kept = tf.TensorArray(tf.float32, 6, element_shape=x.shape)
            _, total, kept = tf.while_loop(lambda step, *_: step < 6, body, (0, x, kept), maximum_iterations=6)
            end = tf.reduce_sum(total) + (tf.reduce_sum(kept.stack()) if is_returned else 0.0)
        return tape.gradient(end, x)

    sweep = swept(gradient, "x")
    forward = next(place for place, one in enumerate(sweep.ops) if sweep.runs[place] and one.type.endswith("While"))
    buffers = sweep.at(2)
    kept = int(buffers.sizes[buffers.makers == forward].sum())
    assert 6 * 2 * MEGABYTE <= kept <= 8.1 * 2 * MEGABYTE and sweep.unknown == 0


def test_loops_of_unknown_length_are_said():
    def loop(x):
        limit = tf.cast(tf.reduce_sum(x), tf.int32)
        kept = tf.TensorArray(tf.float32, 0, dynamic_size=True, element_shape=x.shape)
        added = tf.while_loop(lambda step, _: step < limit, lambda step, kept: (step + 1, kept.write(step, tf.exp(x))), (0, kept))
        return added[1].stack()

    assert swept(loop, "x").unknown > 0


def test_sizes_between_and_beyond_the_traced_ones_follow_a_line():
    sweep = swept(lambda x: tf.transpose(x) + tf.ones([ROW, 1]), "x")
    sizes = [int(sweep.at(size).sizes.max()) for size in (2, 3, 100)]
    assert np.array_equal(sizes, [2 * MEGABYTE, 3 * MEGABYTE, 100 * MEGABYTE])


def test_functions_hold_what_they_compute_with_while_they_are_called():
    inner = tf.function(lambda x: tf.exp(x) + tf.transpose(tf.transpose(x)), experimental_attributes={"_noinline": True})
    live = swept(lambda x: inner(x) + 1.0, "x").at(2).live()
    assert 3 * 2 * MEGABYTE <= live.max() < 3.1 * 2 * MEGABYTE
