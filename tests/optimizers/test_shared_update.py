"""Large parameters of one shape share one traced update; a user's own optimizer is traced parameter by parameter."""

import keras
import pytest
import tensorflow as tf
from training import assert_same, custom_loop, mlp, one_device, strategy_for

import tfdist
from tfdist.optimizers import shared_update
from tfdist.optimizers.slots import slots_of

DEPTH = 3


@pytest.fixture
def all_are_large(monkeypatch):
    monkeypatch.setattr(shared_update, "LARGE_ELEMENTS", 1)


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
    return [
        [op.get_attr("f").name for op in calls if op.device.endswith(f"CPU:{rank}")]
        for rank in range(strategy.num_replicas_in_sync)
    ]


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


@pytest.mark.parametrize("zero_stage", [2, 3])
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
