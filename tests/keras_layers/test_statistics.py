"""Which variables are averaged over the ranks at the end of a step, how they are weighted, and which are left alone."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import per_rank, trace
from training import strategy_for

from tfdist.sharding import ShardedVariable

pytestmark = pytest.mark.timeout(120)

ROWS = (3, 0, 2)


class Running(keras.layers.Layer):
    """Keeps the mean and the number of the examples of the last batch."""

    def __init__(self, dtype="float32", aggregation="none", inside=None):
        super().__init__()
        self.mean, self.rows = (
            self.add_weight(shape=shape, initializer="ones", trainable=False, dtype=dtype, aggregation=kind)
            for shape, kind in (((2,), aggregation), ((), "sum"))
        )
        self.inside = inside or (lambda function: function())

    def call(self, x):
        self.inside(lambda: self.mean.assign(tf.reduce_mean(x, 0)))
        self.rows.value.assign_add(tf.cast(tf.shape(x)[0], self.rows.dtype))
        return x + self.mean


def step_of(strategy, layer, rows=ROWS, before=()):
    """Returns the ranks' parts, the global batch and the outputs of a step."""
    batch = np.random.default_rng(4).normal(size=(sum(rows), 2)).astype("float32")
    parts = np.split(batch, np.cumsum(rows)[:-1])
    arguments = [per_rank(strategy, [one] * len(rows)) for one in before] + [per_rank(strategy, parts)]
    outputs = trace(strategy, lambda *given: layer(given[-1]))(*arguments)
    return parts, batch, [one.numpy() for one in strategy.experimental_local_results(outputs)]


def on_ranks(variable):
    return [component.numpy() for component in variable.value.values]


def made(strategy, *arguments, **keywords):
    with strategy.scope():
        return Running(*arguments, **keywords)


def statistics_of(strategy):
    return [record.shape for record in strategy.last_plan.records[0] if record.label.startswith("statistics")]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_mean_over_examples_becomes_that_of_the_global_batch(dtype):
    """Weighted by rows; what is read behind the assignment is that, too; "sum" counts."""
    strategy = strategy_for(3, 2)
    layer = made(strategy, dtype)
    parts, batch, outputs = step_of(strategy, layer)
    for mean in on_ranks(layer.mean):
        np.testing.assert_allclose(mean.astype("float64"), batch.mean(0), rtol=1e-2 if dtype == "bfloat16" else 1e-6)
    for part, output in zip(parts, outputs, strict=True):
        np.testing.assert_allclose(output.astype("float32"), part + batch.mean(0), rtol=5e-2, atol=1e-2)
    assert [float(rows) for rows in on_ranks(layer.rows)] == [1 + 5] * 3
    assert statistics_of(strategy) == [(3,)]


def test_scalars_before_the_batch_are_no_batch():
    strategy = strategy_for(3, 0)
    layer = made(strategy)
    _, batch, _ = step_of(strategy, layer, before=[np.float32(0.1)])
    np.testing.assert_allclose(on_ranks(layer.mean), [batch.mean(0)] * 3, rtol=1e-6)


def test_in_a_branch():
    strategy = strategy_for(3, 0)

    def in_a_branch(function):
        return tf.cond(tf.constant(True), lambda: tf.identity(function()), lambda: tf.zeros(2))

    layer = made(strategy, inside=in_a_branch)
    _, batch, _ = step_of(strategy, layer)
    np.testing.assert_allclose(on_ranks(layer.mean), [batch.mean(0)] * 3, rtol=1e-6)


def test_what_is_left_alone():
    strategy = strategy_for(2, 2)
    with strategy.scope():
        variables = {
            "integer": keras.Variable(1, dtype="int64", trainable=False),
            "trainable": keras.Variable(1.0),
            "frozen": keras.Variable(1.0),
            "aggregated": keras.Variable(1.0, trainable=False, aggregation="mean"),
            "plain": tf.Variable(1.0, trainable=False),
        }
        scale = keras.Variable(1.0, trainable=False)
        optimizer = keras.optimizers.SGD(0.1)
        metric = keras.metrics.Mean()
        cell = keras.layers.SimpleRNN(2, stateful=True)
        cell.build((2, 3, 2))
    variables["frozen"].trainable = False

    def step(x):
        for variable in variables.values():
            variable.assign(tf.cast(tf.shape(x)[1], variable.dtype))  # no number of rows, which would be that of the batch
        metric.update_state(x)
        cell(x)
        with keras.name_scope("sgd", caller=optimizer):  # as Keras opens it for a step
            scale.assign(tf.reduce_sum(x))

    trace(strategy, step)(per_rank(strategy, [np.ones((2, 3, 2), "float32")] * 2))
    assert statistics_of(strategy) == []


def test_variables_that_are_stored_in_parts_are_left_alone():
    strategy = strategy_for(2, 3)
    with strategy.scope():
        frozen = keras.Variable(np.zeros((3, 2), "float32"))
    frozen.trainable = False
    assert isinstance(frozen.value, ShardedVariable)
    trace(strategy, lambda x: frozen.assign(tf.ones([3, 2])))(per_rank(strategy, [np.ones((1, 2), "float32")] * 2))
    assert statistics_of(strategy) == []
    np.testing.assert_array_equal(frozen, np.ones((3, 2)))


def test_one_rank_and_other_strategies_send_nothing(cpus):
    strategy = strategy_for(1, 3)
    layer = made(strategy)
    _, batch, _ = step_of(strategy, layer, rows=(4,))
    np.testing.assert_allclose(layer.mean, batch.mean(0), rtol=1e-6)
    assert statistics_of(strategy) == []
    mirrored = tf.distribute.MirroredStrategy(cpus[:2])
    layer = made(mirrored)
    parts, _, _ = step_of(mirrored, layer, rows=(2, 1))
    np.testing.assert_allclose(on_ranks(layer.mean), [part.mean(0) for part in parts], rtol=1e-6)


def test_private_names_of_assignment():
    """Every assignment of a Keras variable outside a stateless scope comes through `_direct_assign`."""
    original = keras.Variable._direct_assign._tfdist_original
    assert list(inspect.signature(original).parameters) == ["self", "value"]
    assert original.__module__.startswith("keras.src.backend.tensorflow.")
    variable = keras.Variable(1.0)
    seen = []
    variable._direct_assign = seen.append
    for change in (variable.assign, variable.assign_add, variable.assign_sub):
        change(2.0)
    assert [float(value) for value in seen] == [2.0, 3.0, -1.0]
    assert variable._value is variable.value
    assert isinstance(variable._value, tf.Variable)
