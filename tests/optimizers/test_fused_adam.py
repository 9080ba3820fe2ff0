"""Adam's update where the whole, or the shard, is a variable: one operation for each variable, and Keras's numbers."""

import collections
import functools

import keras
import pytest
import tensorflow as tf
from training import assert_same, custom_loop, fit, mlp, one_device, strategy_for

from tfdist.optimizers import shared_update


def operations_of_a_step(make_optimizer, zero_stage=0):
    """Returns how many operations of each type rank 0 has in a step of two layers with a bias."""
    strategy = strategy_for(2, zero_stage)
    with strategy.scope():
        model = keras.Sequential([keras.Input((9,)), keras.layers.Dense(9), keras.layers.Dense(4)])
        optimizer = make_optimizer()
        optimizer.build(model.trainable_variables)

    def rank_step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    graph = tf.function(lambda x: strategy.run(rank_step, args=(x,))).get_concrete_function(tf.zeros((4, 9))).graph
    return collections.Counter(op.type for op in graph.get_operations() if op.device.endswith("CPU:0"))


def without_biases():
    optimizer = keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.7), weight_decay=0.1, beta_1=0.8, beta_2=0.97, epsilon=1e-4
    )
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_one_operation_a_variable(zero_stage):
    found = operations_of_a_step(keras.optimizers.Adam, zero_stage)
    assert found["ResourceApplyAdam"] == 4
    assert found["Pow"] == 2  # of each beta, once a step
    assert "StatefulPartitionedCall" not in found
    found = operations_of_a_step(without_biases, zero_stage)
    assert (found["ResourceApplyAdam"], found["AssignSubVariableOp"]) == (4, 2)  # two of the four decay


class ByName(keras.optimizers.Adam):
    """May look at the name of what it updates."""


@pytest.mark.parametrize(
    ("optimizer", "zero_stage"),
    [
        (functools.partial(keras.optimizers.Adam, amsgrad=True), 0),
        (keras.optimizers.Nadam, 0),
        (ByName, 0),
        (keras.optimizers.Adam, 1),
        (ByName, 3),
    ],
)
def test_what_is_left_to_keras(optimizer, zero_stage):
    assert operations_of_a_step(optimizer, zero_stage)["ResourceApplyAdam"] == 0


def test_what_is_left_to_xla(monkeypatch):
    monkeypatch.setattr(shared_update, "COMPILED_ELEMENTS", 1)
    found = operations_of_a_step(keras.optimizers.Adam, 3)
    assert (found["ResourceApplyAdam"], found["StatefulPartitionedCall"]) == (0, 4)


@pytest.mark.parametrize(("loop", "zero_stage"), [(fit, 0), (custom_loop, 3)])
def test_numbers(loop, zero_stage):
    assert_same(loop(strategy_for(3, zero_stage), mlp, without_biases), loop(one_device(), mlp, without_biases))


def test_numbers_in_float64(float64):
    assert_same(fit(strategy_for(2, 0), mlp, without_biases), fit(one_device(), mlp, without_biases), rtol=1e-10)


def test_numbers_without_a_graph():
    eager = functools.partial(fit, run_eagerly=True)
    assert_same(eager(strategy_for(2, 0), mlp, without_biases), fit(one_device(), mlp, without_biases))
