"""Where code stands: in a rank, and in which kind, or outside all of them."""

import keras
import pytest
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import SymbolicScope
from ranks import strategy_on

from tfdist.collectives import Where, current_program, rank_program, where

pytestmark = pytest.mark.timeout(120)


def seen(function):
    """Returns where `function`, given to `strategy.run` of two ranks, stands, and whether it has a program there."""
    found = []

    def note():
        function(lambda: found.append((where(), rank_program() is not None)))

    return note, found


def test_outside_ranks(cpus):
    assert where() is Where.NO_RANK and rank_program() is None
    strategy = strategy_on(2)
    with strategy.scope():
        assert where() is Where.CROSS_REPLICA and rank_program() is None
        with SymbolicScope():
            assert where() is Where.SYMBOLIC_BUILD
        variable = tf.Variable(1.0, trainable=False)
        found = []
        strategy.extended.update(variable, lambda v: found.append((where(), rank_program())))
    assert found == [(Where.UPDATE, None)] * 2


def test_in_a_rank_of_another_strategy(cpus):
    note, found = seen(lambda note: note())
    tf.function(lambda: tf.distribute.MirroredStrategy(cpus[:2]).run(note))()
    assert found == [(Where.NO_RANK, False)] * 2


@pytest.mark.parametrize("is_eager", [False, True])
def test_in_a_rank(cpus, is_eager):
    def everywhere(note):
        note()
        with SymbolicScope():
            note()
            assert current_program().is_eager == is_eager
        with tf.init_scope():
            note()

    note, found = seen(everywhere)
    strategy = strategy_on(2)
    call = lambda: strategy.run(note)  # noqa: E731
    call() if is_eager else tf.function(call)()
    rank = Where.EAGER_RANK if is_eager else Where.TRACED_RANK
    # Eager code in a traced rank belongs to no rank.
    last = (rank, True) if is_eager else (Where.NO_RANK, False)
    assert found == [(rank, True), (Where.SYMBOLIC_BUILD, False), last] * 2


def test_in_a_layer_that_keras_builds_by_calling(cpus):
    found = []

    class Noting(keras.layers.Layer):
        def call(self, x):
            found.append(where())
            return x

    strategy = strategy_on(2)
    with strategy.scope():
        layer = Noting()
        layer.compute_output_spec(keras.KerasTensor([2, 3]))
    tf.function(lambda: strategy.run(lambda: layer(tf.ones([2, 3]))))()
    assert found == [Where.SYMBOLIC_BUILD, Where.TRACED_RANK, Where.TRACED_RANK]


def test_only_a_rank_with_peers(cpus):
    found = []
    strategy = strategy_on(2)
    axes = ("data", "pipe", "tensor")
    tf.function(lambda: strategy.run(lambda: found.append([rank_program(peers_on=axis) is not None for axis in axes])))()
    assert found == [[True, False, False]] * 2
