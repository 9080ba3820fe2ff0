"""How long tensors are there: the order of operations, buffers that are taken over, shared, and kept; loops."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.tools.planning.lifetimes import Sweep

MEGABYTE = 2**20
ROW = 2**18  # float32: a megabyte


def swept(function, *specs, batch_sizes=(2, 4)):
    """Returns the sweep of a function of `rows` vectors of a megabyte, traced for two sizes."""
    traces = []
    for size in batch_sizes:
        given = [tf.TensorSpec((size, ROW)) for _ in specs]
        traces.append(tf.function(function, autograph=False).get_concrete_function(*given))
    return Sweep([one.graph for one in traces], batch_sizes, [one.name for one in traces[0].graph.outputs])


def test_what_has_become_ready_runs_first_in_first_out():
    #      exp ── tan ── +
    #      sin ── cos ──┘
    sweep = swept(lambda x: tf.tan(tf.exp(x)) + tf.cos(tf.sin(x)), "x")
    order = [sweep.ops[place].type for place in sweep.at(2).steps]
    assert [kind for kind in order if kind in ("Exp", "Sin", "Tan", "Cos")] == ["Exp", "Sin", "Tan", "Cos"]


def test_each_operation_runs_after_all_that_it_waits_for():
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            end = tf.reduce_sum(tf.tanh(tf.transpose(x)) @ x)
        return tape.gradient(end, x)

    sweep = swept(gradient, "x")
    steps = sweep.at(2).steps
    assert sorted(steps) == [place for place, runs in enumerate(sweep.runs) if runs]
    assert all(steps.index(other) < step for step, place in enumerate(steps) for other in sweep.before[place])


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
