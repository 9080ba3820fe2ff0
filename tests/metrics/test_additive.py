"""Which updates of a metric are sums over rows: seen in the graph of the update; what is not known does not add up."""

import keras
import pytest
import tensorflow as tf
from keras import ops

from tfdist.metrics.additive import adds_up

ROWS = tf.ones([5, 3]), tf.zeros([5, 3])


def of(update, given=ROWS):
    metric = keras.metrics.Metric(name="m")
    metric.total = metric.add_variable((), initializer="zeros", name="total")
    metric.count = metric.add_variable((), initializer="zeros", name="count")
    return adds_up(lambda *rows: update(metric, *rows), (given, {}))


UPDATES = {
    "a sum": (True, lambda m, y, p: m.total.assign_add(ops.sum(ops.abs(y - p)))),
    "a sum that is assigned": (True, lambda m, y, p: m.total.assign(m.total + 2 * ops.sum(y))),
    "a count": (True, lambda m, y, p: m.count.assign_add(ops.cast(ops.shape(y)[0], "float32"))),
    "two sums": (True, lambda m, y, p: (m.total.assign_add(ops.sum(y)), m.count.assign_add(ops.sum(p)))),
    "a mean": (False, lambda m, y, p: m.total.assign_add(ops.mean(ops.abs(y - p)))),
    "a maximum": (False, lambda m, y, p: m.total.assign(ops.maximum(m.total, ops.max(p)))),
    "one": (False, lambda m, y, p: m.count.assign_add(1.0)),
    "a square of a sum": (False, lambda m, y, p: m.total.assign_add(ops.sum(y) ** 2)),
    "times what stays": (True, lambda m, y, p: m.total.assign_add(m.count * ops.sum(y))),
    "times a sum": (False, lambda m, y, p: (m.count.assign_add(ops.sum(p)), m.total.assign_add(m.count * ops.sum(y)))),
    "a sum and a mean": (False, lambda m, y, p: (m.total.assign_add(ops.sum(y)), m.count.assign_add(ops.mean(p)))),
    "a branch": (False, lambda m, y, p: tf.cond(ops.sum(y) > 0, lambda: m.total.assign_add(ops.sum(y)), lambda: m.total + 0)),
    "what cannot be traced": (False, lambda m, y, p: m.total.assign_add(float(ops.sum(y)))),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates(name):
    expected, update = UPDATES[name]
    assert of(update) is expected


def test_ragged_rows_are_not_known():
    assert not of(lambda m, x: m.total.assign_add(1.0 * tf.reduce_sum(x)), (tf.ragged.constant([[1.0], [2.0, 3.0]]),))
