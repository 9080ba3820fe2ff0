"""The report's bytes against the formulas of the stages, and against the variables that exist."""

import math

import keras
import pytest
import tensorflow as tf
from training import BATCH, custom_loop, mlp, one_device, strategy_for, vectors

import tfdist
from tests.devices import kind, names
from tfdist.sharding import placements_of

SIZES = [15 * 33, 33, 1, 3, 33 * 7, 7]  # the weights of `mlp`
TOTAL = 4 * sum(SIZES)
COUNTERS = 8 + 4  # Adam's iteration (int64) and learning rate (float32), never sharded


def ready(strategy):
    """Returns a model and its optimizer as they are before the first step, which adds nothing to them."""
    with strategy.scope():
        model = mlp()
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy")
        model.optimizer.build(model.trainable_variables)
    return model


def sharded(devices):
    return 4 * sum(-(-size // devices) for size in SIZES)


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("zero_stage", range(4))
def test_bytes_equal_the_formulas_of_the_stage(zero_stage, devices):
    report = tfdist.memory_report(ready(strategy_for(devices, zero_stage)))
    part = sharded(devices)
    assert 0 <= devices * part - TOTAL < 4 * devices * len(SIZES)  # padding: less than N elements a variable
    parameter, gradient, slots = {
        0: (TOTAL, TOTAL, 2 * TOTAL),
        1: (TOTAL, TOTAL, 2 * part),
        2: (TOTAL, part, 2 * part),
        3: (part, part, 2 * part),
    }[zero_stage]
    assert len(report.devices) == devices
    assert [memory.device for memory in report.devices] == names(devices)
    for memory in report.devices:
        assert memory.parameter_bytes == parameter
        assert memory.gradient_bytes == gradient
        assert memory.optimizer_bytes == slots + COUNTERS
        assert memory.total_bytes == parameter + gradient + slots + COUNTERS
    formula = placements_of(zero_stage).bytes_per_parameter(devices) * sum(SIZES)
    assert formula <= report.devices[0].total_bytes - COUNTERS < formula + 4 * 4 * devices * len(SIZES)
    assert report.mirrored.total_bytes == 4 * TOTAL + COUNTERS


def test_the_components_are_the_only_copies():
    """What the report counts is what exists: one component per rank, on its device, of the shard's size."""
    model = ready(strategy_for(4, 3))
    before = str(tfdist.memory_report(model))
    model.fit(*vectors(BATCH), batch_size=BATCH, verbose=0)
    assert str(tfdist.memory_report(model)) == before, "training adds to what is there"
    kernel, slot = model.layers[0].kernel.value, model.optimizer.variables[2].value
    for variable in (kernel, slot):
        assert [component.shape for component in variable.values] == [math.ceil(15 * 33 / 4)] * 4
        assert [component.device[-5:] for component in variable.values] == names(4)


def test_other_strategies_and_none():
    assert tfdist.memory_report(ready(one_device())).devices[0].total_bytes == 4 * TOTAL + COUNTERS
    with tf.distribute.MirroredStrategy(names(2)).scope():
        model = mlp()
    report = tfdist.memory_report(model)
    assert [memory.total_bytes for memory in report.devices] == [2 * TOTAL] * 2
    assert "MirroredStrategy, 2 devices" in str(report)


def test_table():
    text = str(tfdist.memory_report(ready(strategy_for(2, 3))))
    assert "ShardedStrategy, zero_stage=3, 2 devices" in text
    lines = text.splitlines()
    assert [line.split()[0] for line in lines if line.startswith((kind(), "mirrored"))] == [*names(2), "mirrored"]
    assert lines[-1].endswith("100.0%")


def test_an_optimizer_without_state_is_said_so():
    with strategy_for(2, 3).scope():
        model = mlp()
        model.compile(optimizer="adam", loss="mse")
    report = tfdist.memory_report(model)
    assert not report.optimizer_is_built
    assert "no state yet" in str(report)


def test_custom_loop_models_count_parameters_and_gradients():
    result = custom_loop(strategy_for(2, 3), mlp, lambda: keras.optimizers.SGD(0.1), steps=1)
    report = tfdist.memory_report(result.model)
    assert report.devices[0].parameter_bytes == report.devices[0].gradient_bytes == sharded(2)


def test_bad_input():
    with pytest.raises(ValueError, match="`model` must be a `keras.Model`"):
        tfdist.memory_report(3)
    with pytest.raises(ValueError, match="no variables yet"):
        tfdist.memory_report(keras.Sequential([keras.layers.Dense(3)]))
