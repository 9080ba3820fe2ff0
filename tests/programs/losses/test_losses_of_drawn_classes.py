"""Sparse ids looked up in a table, and losses of classes that are drawn: a value for each row, without a warning."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import strategy_for

from tests.parity.comparison import assert_same_tree, state
from tests.programs.comparing import on_one_device, run

WORDS = tf.ragged.constant([[1, 2], [3], [4, 5, 6], [], [0, 8], [2], [7, 7, 7]], dtype=tf.int64)
TARGETS = np.array([[1], [2], [3], [4], [5], [6], [7]])


def looked_up(model, ids, labels):
    return tf.reduce_mean(tf.reduce_sum(tf.nn.safe_embedding_lookup_sparse(model.table.value, ids, combiner="mean") ** 2, -1))


def root_of_what_is_looked_up(model, ids, labels):
    """A number of all rows behind it: exact, too."""
    return tf.sqrt(looked_up(model, ids, labels))


def weighted(model, ids, labels):
    weights = tf.sparse.map_values(lambda x: tf.sqrt(tf.cast(x + 1, tf.float32)), ids)
    return tf.reduce_mean(tf.nn.safe_embedding_lookup_sparse(model.table.value, ids, weights) ** 3)


def sampled(loss, model, ids, labels):
    negatives = (tf.constant([1, 5, 2], tf.int64), tf.fill(tf.shape(labels), 0.1), tf.fill([3], 0.2))
    h = tf.nn.safe_embedding_lookup_sparse(model.table.value, ids, combiner="sqrtn")
    return tf.reduce_mean(loss(model.out.value, model.bias.value, labels, h, 3, 9, sampled_values=negatives))


def softmax(model, ids, labels):
    return sampled(tf.nn.sampled_softmax_loss, model, ids, labels)


def contrast(model, ids, labels):
    return sampled(tf.nn.nce_loss, model, ids, labels)


class Words(keras.Model):
    def __init__(self, loss):
        super().__init__()
        self.loss_of_step = loss
        seed = keras.initializers.RandomNormal(seed=3)
        self.table, self.out, self.bias = (self.add_weight(shape=s, initializer=seed) for s in ((9, 4), (9, 4), (9,)))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of_step(self, *data)
        gradients = tape.gradient(loss, self.trainable_variables)
        pairs = [(g, v) for g, v in zip(gradients, self.trainable_variables, strict=True) if g is not None]
        self.optimizer.apply_gradients(pairs)
        return {"value": loss}


def program_of(loss):
    def program(strategy):
        with strategy.scope():
            model = Words(loss)
            model.compile(keras.optimizers.SGD(0.5))
        data = tf.data.Dataset.from_tensor_slices((WORDS.to_sparse(), TARGETS)).batch(4)
        return {**model.fit(data, epochs=2, verbose=0).history, **state(model)}

    program.__name__ = loss.__name__
    return program


PROGRAMS = {loss.__name__: program_of(loss) for loss in (looked_up, root_of_what_is_looked_up, weighted, softmax, contrast)}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("stage", "devices"), [exhaustive(0, 2), (1, 3), (3, 2)])
def test_it_is_one_device_without_a_warning(name, stage, devices):
    program = PROGRAMS[name]
    expected = on_one_device(program)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The loss of ")
        assert_same_tree(run(program, strategy_for(devices, stage)), expected, name, 1e-5)


def test_rows_that_meet_in_what_is_looked_up_are_still_told():
    """The table is of the batch's own rows: nobody says that it is of each row alone."""

    def of_rows(model, ids, labels):
        table = tf.cast(labels, tf.float32) * tf.reduce_sum(model.table.value)
        return tf.reduce_mean(tf.nn.safe_embedding_lookup_sparse(table, tf.sparse.map_values(tf.zeros_like, ids)))

    with pytest.warns(UserWarning, match="The loss of Words contains"):
        run(program_of(of_rows), strategy_for(2, 1))
