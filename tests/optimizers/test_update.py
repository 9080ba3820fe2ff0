"""Small parameters are updated side by side, large ones of one shape by one function; a user's own optimizer sees each."""

import collections
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import assert_same, custom_loop, fit, mlp, one_device, strategy_for

import tfdist
from tests.devices import is_on
from tfdist.optimizers import plan
from tfdist.optimizers.slots import slots_of

DEPTH = 3


@pytest.fixture
def all_are_large(monkeypatch):
    monkeypatch.setattr(plan, "LARGE_ELEMENTS", 1)


def update_calls(strategy, make_optimizer):
    """Returns, per rank, the function called for each parameter's update, in a step of `DEPTH` equal layers."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((9,)), *(keras.layers.Dense(9) for _ in range(DEPTH))])
        optimizer = make_optimizer()
        optimizer.build(model.trainable_variables)

    def rank_step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step = tf.function(lambda x: strategy.run(rank_step, args=(x,)))
    graph = step.get_concrete_function(tf.zeros((4, 9))).graph
    calls = [op for op in graph.get_operations() if op.type == "StatefulPartitionedCall"]
    return [[op.get_attr("f").name for op in calls if is_on(op, rank)] for rank in range(strategy.num_replicas_in_sync)]


@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.usefixtures("all_are_large")
def test_one_function_per_shape_and_rank(zero_stage):
    for calls in update_calls(strategy_for(2, zero_stage), lambda: keras.optimizers.Adam(0.01)):
        assert len(calls) == 2 * DEPTH  # every kernel and every bias
        assert len(set(calls)) == 2


@pytest.mark.usefixtures("all_are_large")
def test_weight_decay_divides_the_functions():
    def optimizer():
        adamw = keras.optimizers.AdamW(0.01)
        adamw.exclude_from_weight_decay(var_names=["bias"])
        return adamw

    strategy = strategy_for(2, 3)
    assert [len(set(calls)) for calls in update_calls(strategy, optimizer)] == [2, 2]


@tfdist.optimizers.elementwise
class ByName(keras.optimizers.SGD):
    """Looks at the name of what it updates, which a shared update could not honour."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate * (2.0 if "bias" in variable.name else 1.0))


@pytest.mark.as_traced
@pytest.mark.parametrize("zero_stage", [exhaustive(2), 3])
def test_a_users_optimizer_sees_each_parameter(zero_stage):
    def optimizer():
        return ByName(0.05, momentum=0.9)

    assert update_calls(strategy_for(2, zero_stage), optimizer) == [[], []]
    assert_same(custom_loop(strategy_for(2, zero_stage), mlp, optimizer), custom_loop(one_device(), mlp, optimizer))


def test_slots_of_a_parameter():
    with strategy_for(2, 3).scope():
        model = mlp()
        optimizer = keras.optimizers.Adam(0.01, amsgrad=True)
        optimizer.build(model.trainable_variables)
    for index, variable in enumerate(model.trainable_variables):
        slots = slots_of(optimizer, variable.value)
        lists = (optimizer._momentums, optimizer._velocities, optimizer._velocity_hats)
        assert {id(slot) for slot in slots} == {id(values[index].value) for values in lists}


def operations_of_a_step(make_optimizer, zero_stage):
    """Returns how many operations of each type rank 0 has in a step of `DEPTH` layers with a bias."""
    strategy = strategy_for(2, zero_stage)
    with strategy.scope():
        model = keras.Sequential([keras.Input((9,)), *(keras.layers.Dense(7 + size) for size in range(DEPTH))])
        optimizer = make_optimizer()
        optimizer.build(model.trainable_variables)

    def rank_step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    graph = tf.function(lambda x: strategy.run(rank_step, args=(x,))).get_concrete_function(tf.zeros((4, 9))).graph
    return collections.Counter(op.type for op in graph.get_operations() if is_on(op, 0))


@pytest.mark.parametrize("zero_stage", range(4))
def test_one_update_for_all(zero_stage):
    assert operations_of_a_step(keras.optimizers.Adam, zero_stage)["Sqrt"] == 2  # of the power of beta, and of the velocities


@pytest.mark.parametrize(("zero_stage", "updates"), [(0, 6), (2, 3)])
def test_a_vector_has_a_limit(zero_stage, updates, monkeypatch):
    """Whole: 9, 72, 8, 56, 7 and 63 elements. Shards: 5 + 36 + 4, 28 + 4, 32."""
    monkeypatch.setattr(plan, "JOINT_ELEMENTS", 60)
    assert operations_of_a_step(keras.optimizers.Adam, zero_stage)["Sqrt"] == 2 * updates


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_parameters_that_decay_are_apart(zero_stage):
    def optimizer():
        adamw = keras.optimizers.AdamW(0.01)
        adamw.exclude_from_weight_decay(var_names=["bias"])
        return adamw

    assert operations_of_a_step(optimizer, zero_stage)["Sqrt"] == 2 * 2


@tfdist.optimizers.elementwise
class AdamByName(keras.optimizers.Adam):
    """May look at the name of what it updates."""


@pytest.mark.parametrize("zero_stage", range(4))
def test_a_users_optimizer_sees_each_small_parameter(zero_stage):
    assert operations_of_a_step(AdamByName, zero_stage)["Sqrt"] == 2 * 2 * DEPTH


@pytest.mark.as_traced
@pytest.mark.parametrize("zero_stage", [0, exhaustive(1), exhaustive(2), 3])
def test_slots_are_keras_own_to_rounding(zero_stage):
    """Each within a few units in the last place of its largest element: no other formula, however close."""
    adam = functools.partial(keras.optimizers.AdamW, 0.01, weight_decay=0.1)
    loop = fit if zero_stage == 0 else custom_loop
    found, expected = loop(strategy_for(2, zero_stage), mlp, adam), custom_loop(one_device(), mlp, adam)
    for name, mine, theirs in zip(found.slots, found.slots.values(), expected.slots.values(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=4e-6 * np.abs(theirs).max(), err_msg=name)


def test_without_a_graph():
    eager = functools.partial(fit, run_eagerly=True)
    found = eager(strategy_for(2, 0), mlp, keras.optimizers.Adam)
    expected = fit(one_device(), mlp, keras.optimizers.Adam)
    for mine, theirs in zip(found.slots.values(), expected.slots.values(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * max(np.abs(theirs).max(), 1e-6))
