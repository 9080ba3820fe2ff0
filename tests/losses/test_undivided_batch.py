"""Of a batch that every rank was given, rows count on the first rank alone where they are summed."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import run, strategy_on

from tfdist.collectives import current_program
from tfdist.losses.undivided_batch import DealtBatches, GivenBatch, is_given_everywhere, of_given_batches


def test_rows_count_once():
    def on_rank():
        given, rows, number = current_program("test").part(GivenBatch), tf.ones([5, 3]), tf.constant(2.0)
        assert given.once(rows) is rows and given.copies == 1 and not is_given_everywhere()
        given.give(rows)
        assert given.copies == 3 and is_given_everywhere()
        some = given.once(rows)
        assert some is given.once(rows)
        return tf.shape(some)[0], given.once(number)

    assert [[int(x) for x in rank] for rank in run(strategy_on(3), on_rank)] == [[5, 2], [0, 0], [0, 0]]


def test_which_batches_are_given_everywhere():
    """Those of what is no distributed iterator, and has not been dealt to the ranks."""
    strategy, rows = strategy_on(2), np.ones([3], "float32")

    def is_given(iterator):
        found = []

        def step(data):
            found.append((is_given_everywhere(), tuple(data.shape)))
            return tf.zeros([])

        def make(on_rank):
            return lambda elements: [strategy.run(on_rank, args=(data,)) for data in elements]

        of_given_batches(step, make)(iterator)
        return found

    assert is_given([rows]) == [(True, (3,))] * 2
    assert is_given(DealtBatches([tf.constant(rows)])) == [(False, (3,))] * 2
    assert is_given(iter(tf.data.Dataset.from_tensors(rows))) == [(False, (3,))] * 2


class Values(keras.metrics.Metric):
    """The sum of the values of ragged or sparse targets."""

    def __init__(self):
        super().__init__(name="values")
        self.total = self.add_weight(initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        values = y_true.flat_values if isinstance(y_true, tf.RaggedTensor) else y_true.values
        self.total.assign_add(tf.reduce_sum(values))

    def result(self):
        return self.total


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_targets_that_are_not_dense_count_once(kind):
    rows = [[1.0, 2.0], [3.0], [], [4.0, 5.0, 6.0], [7.0]]
    targets = tf.ragged.constant(rows) if kind == "ragged" else tf.ragged.constant(rows).to_sparse()
    with strategy_on(3).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.compile("sgd", lambda _, predicted: keras.ops.mean(predicted, -1), metrics=[Values()])
    for method in (model.train_on_batch, model.test_on_batch):
        assert method(tf.ones([5, 2]), targets, return_dict=True)["values"] == 28.0
        model.reset_metrics()
