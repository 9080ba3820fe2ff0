"""What the loss of an `OverGlobalBatch` is given on a rank: the rows of all, with their masks, as the step has them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import run, strategy_on

from tfdist.losses import OverGlobalBatch

TRUE = [np.array([[1, 2], [3, 4], [5, 6]], np.int32), np.array([[7, 8]], np.int32)]  # 3 rows and 1
PRED = [rows.astype("float32") / 2 for rows in TRUE]


def test_a_function_gets_all_rows_as_they_are():
    """Integers stay integers and a number is passed on; outside ranks nothing changes."""
    given = []

    def largest(y_true, y_pred):
        given.append([x.dtype for x in tf.nest.flatten((y_true, y_pred))])
        return tf.reduce_max(tf.cast(y_true["ids"], tf.float32) * y_pred) + y_true["temperature"]

    loss = OverGlobalBatch(largest)
    strategy = strategy_on(2)
    found = run(strategy, lambda t, p: loss({"ids": t, "temperature": tf.constant(0.5)}, p), TRUE, PRED)
    assert float(np.sum(found)) == 32.5, "the ranks' shares make up the loss of one device"
    assert strategy.last_plan.counts()["all_gather"] >= 2
    assert given == [[tf.int32, tf.float32, tf.float32]] * 2
    everything = {"ids": np.concatenate(TRUE), "temperature": 0.5}
    assert float(loss(tf.nest.map_structure(tf.constant, everything), tf.constant(np.concatenate(PRED)))) == 32.5


def test_a_function_of_two_tensors_gets_integers_too():
    """Which Keras would turn into floats."""
    given = []

    def largest(y_true, y_pred):
        given.append(y_true.dtype)
        return tf.reduce_max(tf.cast(y_true, tf.float32) * y_pred)

    assert float(np.sum(run(strategy_on(2), OverGlobalBatch(largest), TRUE, PRED))) == 32
    assert given == [tf.int32] * 2


def test_what_keras_has_put_on_predictions_is_gathered_with_them():
    given = []

    class Masked(keras.losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            given.append(y_pred._keras_mask)
            mask = tf.cast(y_pred._keras_mask, tf.float32)
            return tf.reduce_sum(y_pred * mask) * 0 + tf.reduce_sum(mask * [[1.0], [10], [100], [1000]]) / 2

    def on_rank(y_true, y_pred):
        y_pred = tf.identity(y_pred)
        y_pred._keras_mask = y_true > 2
        return OverGlobalBatch(Masked())(y_true, y_pred)

    assert float(np.sum(run(strategy_on(2), on_rank, TRUE, PRED))) == 1110
    assert all(mask.dtype == tf.bool for mask in given) and len(given) == 2


@pytest.mark.parametrize("make", [lambda x: tf.RaggedTensor.from_tensor(x), tf.sparse.from_dense, tf.as_string])
def test_what_cannot_be_gathered_is_refused(make):
    def on_rank(y_true, y_pred):
        return OverGlobalBatch("mse")(make(y_true), y_pred)

    with pytest.raises(NotImplementedError, match="cannot gather a"):
        run(strategy_on(2), on_rank, TRUE, PRED)
