"""Which outputs of a loop or a branch are linear in the gradients taken inside of it, with nothing added."""

import pytest
import tensorflow as tf

from tfdist.graphs import tape
from tfdist.sharding.carried_gradients import CarriedGradients

SIZE = 3


def places(make, notes=lambda state, made: state.note(made), state=None):
    """Returns the places of the results of `make(gradient)`, of one loop or branch, that come out of it as gradients.

    `gradient()` returns a gradient, taken where it is called.
    """
    state = state or CarriedGradients(None)

    def gradient():
        made = tf.random.uniform([SIZE])
        notes(state, made)
        return made

    graph = tf.function(lambda: make(gradient), autograph=False).get_concrete_function().graph
    [operation] = [op for op in graph.get_operations() if op.type in (*tape.BRANCHES, *tape.LOOPS)]
    found = {x.name for x in state.out_of(operation)}
    assert state.are_any

    def output_of(x):
        while x.op is not operation:
            x = x.op.inputs[x.value_index]
        return x.name

    return [place for place, x in enumerate(tf.nest.flatten(graph.structured_outputs)) if output_of(x) in found]


def looped(body, *start):
    """Returns the sums that `body` makes of those before, beginning with `start`."""
    return tf.while_loop(lambda step, *sums: step < 2, lambda step, *sums: (step + 1, *body(*sums)), (0, *start))[1:]


def zeros():
    return tf.zeros([SIZE])


def ones():
    return tf.ones([SIZE])


@pytest.mark.parametrize(
    ("body", "start", "expected"),
    [
        (lambda g: lambda s: [s + 2.0 * g()], [zeros], [0]),
        (lambda g: lambda s: [s + g()], [ones], []),  # something is added
        (lambda g: lambda s: [s + tf.square(g())], [zeros], []),
        (lambda g: lambda s, t: [s + g(), t + 1.0], [zeros, zeros], [0]),
        (lambda g: lambda s, t: [t + g(), s], [zeros, zeros], [0, 1]),  # that of the round before
        (lambda g: lambda s, t: [g(), s], [zeros, zeros], [0, 1]),
        (lambda g: lambda s, t: [t + g(), s], [zeros, ones], []),  # the ones come round
        (lambda g: lambda s, t, u: [t + g(), u, u], [zeros, zeros, ones], []),  # after two rounds
    ],
)
def test_loops(body, start, expected):
    assert places(lambda gradient: looped(body(gradient), *(make() for make in start))) == expected


@pytest.mark.parametrize(
    ("late", "early", "expected"),
    [
        (lambda g: [g()], lambda g: [zeros()], [0]),
        (lambda g: [g()], lambda g: [ones()], []),
        (lambda g: [g(), zeros()], lambda g: [-g(), zeros()], [0]),  # zeros on both sides are no gradient
    ],
)
def test_branches(late, early, expected):
    def make(gradient):
        return tf.cond(tf.random.uniform([]) < 0.5, lambda: late(gradient), lambda: early(gradient))

    assert places(make) == expected


def test_a_loop_in_a_branch():
    def make(gradient):
        return tf.cond(tf.random.uniform([]) < 0.5, lambda: looped(lambda s: [s + gradient()], zeros()), lambda: (zeros(),))

    assert places(make) == [0]


def test_a_tensor_of_the_same_name_in_another_graph_is_no_gradient():
    state = CarriedGradients(None)

    def make(gradient):
        return looped(lambda s: [s + gradient()], zeros())

    assert places(make, state=state) == [0]
    assert places(make, notes=lambda state, made: None, state=state) == []
