"""Every optimizer, every stage, 2, 3 and 4 ranks: losses, weights and slots of one device."""

import functools

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from pretended_gpus import pretended_gpus
from training import assert_same, custom_loop, fit, one_device, small, strategy_for

from tests.devices import of_cpus
from tfdist.optimizers import plan

pytestmark = pytest.mark.as_traced

optimizers = keras.optimizers


def decaying(optimizer):
    """AdamW on a schedule, with shifts and the scalar excluded from weight decay."""
    optimizer.exclude_from_weight_decay(var_names=["shift", "scale"])
    return optimizer


OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optimizers.RMSprop(0.01, rho=0.8, momentum=0.5, centered=True),
    "adam": lambda: optimizers.Adam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: decaying(
        optimizers.AdamW(optimizers.schedules.ExponentialDecay(0.02, 2, 0.7, staircase=True), weight_decay=0.1)
    ),
    "adadelta": lambda: optimizers.Adadelta(1.0, rho=0.9),
    "adagrad": lambda: optimizers.Adagrad(0.05),
    "adamax": lambda: optimizers.Adamax(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "ftrl": lambda: optimizers.Ftrl(0.05, l1_regularization_strength=0.001, l2_regularization_strength=0.01),
    "lion": lambda: optimizers.Lion(0.003, weight_decay=0.05),
}
GRID = [(stage, devices) for stage in range(4) for devices in (2, 3, 4)]


@functools.cache
def on_one_device(train, name):
    return train(one_device(), small, OPTIMIZERS[name])


VARIANTS = ("momentum", "amsgrad")  # of optimizers in the table: with the number of ranks whose turn it is only


def _cases():
    """Each optimizer with one stage and number of ranks: every stage meets every number once. All that is left is exhaustive.

    What optimizers do is done element by element, of shards or whole; `tests/parity/test_optimizers.py` has those that do more.
    """
    for place, name in enumerate(OPTIMIZERS):
        for zero_stage, devices in GRID:
            is_its_turn = devices == (2, 3, 4)[place // 4]
            if is_its_turn and zero_stage == (3, 1, 2, 0)[place % 4]:
                yield name, zero_stage, devices
            elif is_its_turn or name not in VARIANTS:
                yield exhaustive(name, zero_stage, devices)


@pytest.mark.parametrize(("name", "zero_stage", "devices"), _cases())
def test_parity(name, zero_stage, devices):
    # At one stage through `fit`, which costs more.
    train = custom_loop if (zero_stage + list(OPTIMIZERS).index(name)) % 4 else fit
    assert_same(train(strategy_for(devices, zero_stage), small, OPTIMIZERS[name]), on_one_device(train, name))


@pytest.mark.parametrize("zero_stage", [0, exhaustive(1), exhaustive(2), 3])
def test_an_optimizer_that_is_built_in_the_first_step(zero_stage):
    built = functools.partial(custom_loop, builds_in_step=True)
    assert_same(built(strategy_for(2, zero_stage), small, OPTIMIZERS["adamw"]), on_one_device(custom_loop, "adamw"))


@pytest.mark.parametrize(
    ("name", "zero_stage"),
    [
        ("adamw", 1),
        ("amsgrad", 3),
        exhaustive("nadam", 2),
        exhaustive("rmsprop", 0),
        exhaustive("ftrl", 1),
        exhaustive("lion", 3),
    ],
)
def test_compiled_updates(monkeypatch, name, zero_stage):
    """As large shards have them: see `plan`. Here of all sizes, padded ones among them."""
    monkeypatch.setattr(plan, "LARGE_ELEMENTS", 1)
    monkeypatch.setattr(plan, "COMPILED_ELEMENTS", 1)
    monkeypatch.setattr(plan, "COMPILER_PAYS_IN_ALL", 1)
    assert_same(custom_loop(strategy_for(2, zero_stage), small, OPTIMIZERS[name]), on_one_device(custom_loop, name))


@of_cpus("XLA compiles updates there alone")
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_updates_of_large_shards_are_shared_and_of_larger_ones_compiled(monkeypatch, zero_stage):
    monkeypatch.setattr(plan, "LARGE_ELEMENTS", 100)
    monkeypatch.setattr(plan, "COMPILED_ELEMENTS", 101)
    monkeypatch.setattr(plan, "COMPILER_PAYS_IN_ALL", 300)  # what a rank steps in all
    updates = updates_of(strategy_for(2, zero_stage))
    assert updates() == (2 * 2, 2 * 1)
    monkeypatch.setattr(plan, "COMPILER_PAYS_IN_ALL", 301)
    assert updates() == (2 * 2, 0)
    monkeypatch.setattr(plan, "COMPILER_PAYS_IN_ONE", 101)
    assert updates() == (2 * 2, 2 * 1)
    monkeypatch.setattr(plan, "COMPILER_PAYS_IN_ONE", 102)
    assert updates() == (2 * 2, 0)


def test_on_gpus_updates_are_compiled_where_kernels_are_asked_for(monkeypatch):
    monkeypatch.setattr(plan, "LARGE_ELEMENTS", 100)
    monkeypatch.setattr(plan, "COMPILED_ELEMENTS", 101)
    monkeypatch.setattr(plan, "COMPILER_PAYS_IN_ALL", 300)
    with pretended_gpus(are_whole=False):
        for use_kernels, compiled in ((None, 0), (False, 0), (True, 2 * 1)):
            assert updates_of(strategy_for(2, 3, use_kernels=use_kernels))() == (2 * 2, compiled)


def updates_of(strategy):
    """Returns a function that returns how many update functions a step has on both ranks, and how many of them are compiled."""
    with strategy.scope():
        variables = [tf.Variable(tf.zeros([size])) for size in (198, 199, 201)]  # shards of 99, 100 and 101
        optimizer = optimizers.Adam(0.01)
        optimizer.build(variables)

    def updates():
        @tf.function
        def step():
            strategy.run(lambda: optimizer.apply([tf.ones_like(variable) for variable in variables], variables))

        functions = step.get_concrete_function().graph.as_graph_def().library.function
        found = [function for function in functions if "_noinline" in function.attr]
        return len(found), sum(function.attr["_XlaMustCompile"].b for function in found)

    return updates
