"""Ranks that would wait for each other for ever because of what TensorFlow adds to their order: found before the first call."""

import pytest
import tensorflow as tf
from training import strategy_for

import tfdist
from tfdist.collectives import finished_graphs

pytestmark = pytest.mark.timeout(60)


def counted(strategy, counter, order, size=3):
    """Returns a step in which each rank uses `counter` and sends, in this `order`."""

    def of_rank():
        x = tf.ones([size])
        for one in order:
            if one == "write":
                counter.assign(x[0])
            elif one == "read":
                x = x * counter
            else:
                x = tfdist.collectives.all_reduce(x, "data", reduce_op="mean")
        return x

    return tf.function(lambda: strategy.run(of_rank))


@pytest.mark.parametrize(
    ("order", "is_circle"),
    [
        (["send"], False),
        (["write", "send"], False),
        (["send", "write"], False),
        (["send", "read"], False),
        (["read", "send", "read"], False),
        (["write", "send", "write"], False),
        (["send", "write", "read", "send"], False),
        (["read", "send", "write"], True),  # the second rank's read is behind the first one's write, which waits for the second
        (["read", "send", "send", "write"], True),
        (["send", "read", "send", "read", "send", "write"], True),
    ],
)
@pytest.mark.parametrize("devices", [2, 3])
def test_a_variable_that_ranks_share(order, is_circle, devices):
    strategy = strategy_for(devices, 0)
    step = counted(strategy, tf.Variable(1.0), order)
    if is_circle:
        with pytest.raises(
            RuntimeError, match=r"wait for each other for ever: .*AssignVariableOp.* on CPU:.*strategy.scope"
        ) as error:
            step()
        assert "CPU:1 waits for" in str(error.value)
    else:
        step()
    with strategy.scope():  # the fix that the error names
        own = tf.Variable(1.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    counted(strategy, own, order)()


def test_in_a_loop_of_another_function():
    step = counted(strategy_for(2, 0), tf.Variable(1.0), ["read", "send", "write"])

    @tf.function
    def several():
        for _ in tf.range(2):
            step()

    with pytest.raises(RuntimeError, match="wait for each other for ever"):
        several()


def test_a_table_that_ranks_share():
    strategy = strategy_for(2, 0)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    @tf.function
    def step():
        def of_rank():
            known = tf.ensure_shape(table.lookup(tf.constant([1], tf.int64)), [1])
            total = tfdist.collectives.all_reduce(known, "data")
            table.insert(tf.constant([1], tf.int64), total + 1.0)

        strategy.run(of_rank)

    with pytest.raises(RuntimeError, match="wait for each other for ever"):
        step()


def test_each_graph_is_looked_at_once(monkeypatch):
    looked = []
    monkeypatch.setattr(finished_graphs, "check", looked.append)
    step = counted(strategy_for(2, 0), tf.Variable(1.0), ["send"])
    for _ in range(3):
        step()
    assert len(looked) == 1
