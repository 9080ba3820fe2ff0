"""Variables that are made in a separate thread while a step is traced: there as if they had always been."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import strategy_on, trace

from tfdist.sharding import keras_scope
from tfdist.sharding.separate_thread import in_separate_thread, made_by, move, outside_ranks


def test_it_is_in_no_graph_no_scope_and_no_strategy():
    def where():
        return threading.get_ident(), tf.executing_eagerly(), keras_scope.callers(), tf.distribute.has_strategy()

    with strategy_on(2).scope(), keras.name_scope("layer", caller="layer"), tf.Graph().as_default():
        thread, *found = in_separate_thread(where)
    assert thread != threading.get_ident() and found == [True, [], False]


def test_errors_come_back():
    with pytest.raises(ZeroDivisionError):
        in_separate_thread(lambda: 1 / 0)


def test_a_rank_keeps_what_keras_knows():
    strategy, found = strategy_on(2), []

    def on_rank():
        with keras.name_scope("layer", caller="layer"):
            outside_ranks(lambda: found.append((keras_scope.callers(), tf.distribute.get_strategy(), tf.executing_eagerly())))
        return tf.zeros([])

    trace(strategy, on_rank)()
    assert found == [(["layer"], strategy, True)] * 2


def test_outside_of_ranks_it_is_called_where_it_is():
    found = []
    outside_ranks(lambda: found.append(threading.get_ident()))
    assert found == [threading.get_ident()]


def test_moved_variables_keep_their_values():
    strategy, plain = strategy_on(2), keras.Variable(np.arange(5.0, dtype="float32"))
    with strategy.scope():
        own = keras.Variable(1.0)
    kept, old = own._value, plain._value
    assert made_by(plain) is None and made_by(own) is strategy
    move([plain, own], strategy)
    assert made_by(plain) is strategy and plain._value is not old and own._value is kept
    assert plain.numpy().tolist() == [0, 1, 2, 3, 4]
