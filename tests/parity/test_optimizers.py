"""Clipping, averages, accumulation, loss scaling, constraints and whole-tensor optimizers: what one device computes."""

import copy
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive

from tests import training
from tests.parity import optimizer_cases as table

pytestmark = pytest.mark.as_traced


def _cases():
    """Every row at one stage: in turns at 3 and at 0, 1 or 2.

    Loops take turns, too, and of every six rows one has 3 ranks and one 4. Tracing is what a case costs.
    """
    for place, (name, case) in enumerate(table.CASES.items()):
        for stage in range(4):
            loop = "fit" if (place // 2 + stage) % 2 or case.scales_loss else "custom_loop"
            if stage == (place // 2 % 3 if place % 2 else 3):
                yield name, stage, (2, 3, 2, 2, 4, 2)[place % 6], loop
            else:
                yield exhaustive(name, stage, 2 + (place // 2 + stage) % 3, loop)


@functools.cache
def on_one_device(name, loop):
    return numbers(table.train(name, loop, training.one_device()))


@functools.cache
def overflowing_on_one_device(accumulates):
    return numbers(table.train_overflowing(training.one_device(), accumulates))


def numbers(trained):
    """What a cache keeps."""
    trained.model = trained.strategy = None
    return trained


@pytest.mark.parametrize(("name", "zero_stage", "devices", "loop"), list(_cases()))
def test_parity(name, zero_stage, devices, loop):
    trained = table.train(name, loop, training.strategy_for(devices, zero_stage))
    training.assert_same(trained, on_one_device(name, loop))


def test_the_limits_bind():
    """Otherwise the clipping rows would prove nothing."""
    keras.utils.set_random_seed(3)
    model, (x, y) = training.small(), training.vectors()
    with tf.GradientTape() as tape:
        loss = training.loss_function()(y[:12], model(x[:12]))
    grads = tape.gradient(loss, model.trainable_variables)
    norms = [float(tf.norm(grad)) for grad in grads]
    assert min(norms[0], norms[-1], norms[-2]) > 2 * table.LIMIT
    assert max(float(tf.reduce_max(abs(grad))) for grad in grads) > table.LIMIT / 5
    with tf.device("CPU:0"):
        keras.utils.set_random_seed(3)
        weights = table.constrained().get_weights()
    assert np.linalg.norm(weights[0], axis=0).max() > 0.6 and abs(np.linalg.norm(weights[2], axis=1) - 1).max() > 0.1


@pytest.mark.parametrize(
    ("zero_stage", "devices", "accumulates"),
    [
        (0, 2, False),
        exhaustive(0, 2, True),
        exhaustive(1, 4, False),
        (1, 4, True),
        exhaustive(2, 3, False),
        exhaustive(2, 3, True),
        exhaustive(3, 2, False),
        (3, 2, True),
    ],
)
def test_overflow_of_one_rank_skips_the_step_on_all(zero_stage, devices, accumulates):
    expected = overflowing_on_one_device(accumulates)
    scale = next(value for name, value in expected.slots.items() if "dynamic_scale" in name)
    assert scale == 2.0**39, "nothing overflowed"
    assert all(np.isfinite(value).all() for value in expected.weights.values())
    training.assert_same(table.train_overflowing(training.strategy_for(devices, zero_stage), accumulates), expected)


def swapping(strategy):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    x, y = training.vectors()
    with strategy.scope():
        model = training.small()
        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), training.loss_function())
    data = {"x": x, "y": y, "batch_size": 12, "shuffle": False, "verbose": 0, "epochs": 2}
    history = model.fit(**data, validation_data=(x, y), callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
    swapped = model.get_weights()
    model.fit(**data)
    slots = [variable.numpy() for variable in model.optimizer.variables]
    return history.history["loss"], history.history["val_loss"], swapped, model.get_weights(), slots


@functools.cache
def swapping_on_one_device():
    return swapping(training.one_device())


@pytest.mark.parametrize("zero_stage", [exhaustive(0), exhaustive(2), 3])  # weights and averages whole, averages cut, both cut
def test_swapping_of_averages(zero_stage):
    """`SwapEMAWeights` and the end of `fit` put the averages in the weights."""
    for ours, theirs in zip(swapping(training.strategy_for(2, zero_stage)), swapping_on_one_device(), strict=True):
        for mine, reference in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(mine, reference, rtol=0, atol=1e-5 * max(np.abs(reference).max(), 1e-2))


def interrupted(name, first, second, path):
    """Trains three steps under `first`, saves, loads under `second` and trains three more; returns losses, weights, slots."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    x, y = training.vectors()
    halves = [(x[:36], y[:36]), (x[36:], y[36:])]
    rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate)
    callbacks = [] if name == "several optimizers" else [rates]  # it has no learning rate of its own
    losses = []
    callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(logs["loss"])))
    with first.scope():
        model = table.constrained()
        model.compile(table.CASES[name].optimizer(), training.loss_function())
    model.fit(*halves[0], batch_size=12, shuffle=False, verbose=0, callbacks=callbacks)
    model.save(path)
    with second.scope():
        model = keras.models.load_model(path)
    model.fit(*halves[1], batch_size=12, shuffle=False, verbose=0, callbacks=callbacks)
    return training.collect(model, model.optimizer, losses, second)


def strategy_of(part):
    return training.strategy_for(*part) if part else training.one_device()


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        exhaustive("average overwrites", (3, 1), (2, 3)),
        exhaustive("accumulation", (2, 2), (4, 0)),
        exhaustive("accumulation and averages", (3, 1), (2, 3)),
        ("dynamic loss scale and accumulation", (2, 2), (3, 0)),
        exhaustive("several optimizers", (2, 3), (3, 1)),
        exhaustive("muon", None, (2, 3)),
        exhaustive("muon", (2, 1), None),
        exhaustive("adafactor", None, (3, 3)),
        ("adafactor", (2, 1), None),
    ],
)
def test_a_run_goes_on_from_a_file_at_another_stage(name, first, second, tmp_path):
    """In the middle of an accumulation too; learning rates are halved by a callback in each part.

    `(devices, zero_stage)`, None for no strategy: the state of optimizers that look at whole tensors is saved whole.
    """
    one = training.one_device()
    expected = interrupted(name, one, one, tmp_path / "one.keras")
    training.assert_same(interrupted(name, strategy_of(first), strategy_of(second), tmp_path / "several.keras"), expected)


@pytest.mark.parametrize("name", sorted(set(table.CASES) - {"unknown", "declared elementwise", "several optimizers"}))
def test_configurations_survive_the_round_trip(name):
    with training.strategy_for(2, 3).scope():
        optimizer = table.CASES[name].optimizer()
        config = optimizer.get_config()
        # A copy, because Keras takes the inner optimizer out of what it is given.
        assert type(optimizer).from_config(copy.deepcopy(config)).get_config() == config
