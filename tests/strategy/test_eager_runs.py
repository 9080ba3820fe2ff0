"""`run_eagerly=True` and `strategy.run` outside any `tf.function`: losses, weights and slots of one device.

Over several workers: tests/parity/test_two_workers.py.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import training
from grids import exhaustive
from test_models import LABELS, MODELS, SEQUENCES, TOKENS, embedding
from training import BATCH, CLASSES, assert_same, custom_loop, fit, loss_function, mlp, one_device, small, strategy_for, vectors


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


@pytest.fixture
def eagerly():
    """Makes every `tf.function` plain Python."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@functools.cache
def on_one_device(train, build=small):
    return train(one_device(), build, momentum)


@pytest.mark.parametrize("zero_stage", [0, exhaustive(1), 2, 3])
def test_fit(zero_stage):
    ours = fit(strategy_for(2, zero_stage), small, momentum, run_eagerly=True, metrics=["accuracy"])
    assert_same(ours, on_one_device(fit))
    assert ours.model.run_eagerly
    # The collectives of the traced step, but one gather per parameter, one of its gradient, and no rounds to save memory.
    expected = {
        0: {"all_reduce": 2},
        1: {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 1},
        2: {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 1},
        3: {"all_reduce": 1, "reduce_scatter": 3, "all_gather": 6},
    }
    assert ours.strategy.last_plan.counts() == expected[zero_stage]


@pytest.mark.parametrize("zero_stage", [exhaustive(0), exhaustive(1), exhaustive(2), 3])
def test_custom_loop(zero_stage, eagerly):
    """The optimizer is built by the first rank, in the middle of its first step."""
    assert_same(custom_loop(strategy_for(3 if zero_stage == 3 else 2, zero_stage), small, momentum), on_one_device(custom_loop))


@pytest.mark.parametrize("name", [exhaustive("control_flow"), "lazily_built", "kinds_of_weights"])
def test_architectures_of_stage_3(name):
    sgd = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
    data = (SEQUENCES[:36], LABELS[:36])
    expected = fit(one_device(), MODELS[name], sgd, data=data, epochs=2, run_eagerly=True)
    assert_same(fit(strategy_for(2, 3), MODELS[name], sgd, data=data, epochs=2, run_eagerly=True), expected)


@pytest.mark.parametrize("zero_stage", [exhaustive(0), 3])
def test_embeddings(zero_stage):
    sgd = functools.partial(keras.optimizers.SGD, 0.5)
    expected = fit(one_device(), embedding, sgd, data=(TOKENS, LABELS))
    assert_same(fit(strategy_for(2, zero_stage), embedding, sgd, data=(TOKENS, LABELS), run_eagerly=True), expected)


@pytest.mark.parametrize("zero_stage", [exhaustive(1), 3])
def test_evaluate_and_predict_on_batches_that_do_not_divide(zero_stage):
    results = []
    x, y = vectors(29)
    for strategy in (strategy_for(2, zero_stage), one_device()):
        keras.utils.set_random_seed(2)
        with strategy.scope():
            model = mlp()
            model.compile(loss=loss_function(), metrics=["accuracy"], run_eagerly=True)
        results.append([*model.evaluate(x, y, batch_size=9, verbose=0), model.predict(x, batch_size=9, verbose=0)])
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_gradient_of_a_gradient(eagerly):
    def train(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model, optimizer = mlp(), keras.optimizers.SGD(0.05)

        rank_step = training.gradient_penalty(strategy, model, optimizer)
        dataset = tf.data.Dataset.from_tensor_slices(vectors(24)[0]).batch(BATCH)
        for x in strategy.experimental_distribute_dataset(dataset):
            strategy.run(rank_step, args=(x,))
        return model.get_weights()

    for mine, theirs in zip(train(strategy_for(2, 3)), train(one_device()), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("shape", [(5, 3), (4,), (1,), ()])
def test_gradients_that_do_not_come_from_a_tape_are_summed(zero_stage, traced, shape):
    strategy = strategy_for(2, zero_stage)
    with strategy.scope():
        variable = tf.Variable(np.ones(shape, "float32"))
        optimizer = keras.optimizers.SGD(0.5)

    def rank_step():
        rank = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        optimizer.apply([tf.ones(shape) + rank], [variable])

    for _ in range(2):
        (tf.function(strategy.run) if traced else strategy.run)(rank_step)
    np.testing.assert_allclose(variable.numpy(), np.full(shape, 1 - 2 * 0.5 * 3.0))


@pytest.mark.parametrize("traced", [False, True])
def test_gradient_of_another_shape(traced):
    strategy = strategy_for(2, 3)
    with strategy.scope():
        variable = tf.Variable(np.ones((5, 3), "float32"))
        optimizer = keras.optimizers.SGD(0.5)
    with pytest.raises(ValueError, match=r"(?s)gradient of sharded parameter .* \(5, 3\).*\(8,\).*shape=\(3, 5\)"):
        (tf.function(strategy.run) if traced else strategy.run)(lambda: optimizer.apply([tf.ones((3, 5))], [variable]))


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_function_in_an_eager_rank(zero_stage):
    """Runs as without its decorator; one that is compiled is refused where ranks would have to meet in it."""

    def train(strategy, jit_compile=None):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model, optimizer = small(), keras.optimizers.SGD(0.1)

        @tf.function(jit_compile=jit_compile)
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        dataset = tf.data.Dataset.from_tensor_slices(vectors(24)[0]).batch(BATCH)
        for x in strategy.experimental_distribute_dataset(dataset):
            strategy.run(lambda x: step(x), args=(x,))
        return model.get_weights()

    for mine, theirs in zip(train(strategy_for(2, zero_stage)), train(one_device()), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    with pytest.raises(RuntimeError, match="Eager ranks meet in Python|a nested `tf.function`"):
        train(strategy_for(2, zero_stage), jit_compile=True)


@pytest.mark.parametrize("zero_stage", [exhaustive(0), 3])
def test_mixed_precision(zero_stage):
    """Parameters of stage 3 are gathered in the dtype that the layer computes in, as when traced."""

    def build():
        return keras.Sequential([keras.Input((15,)), keras.layers.Dense(CLASSES, dtype="mixed_bfloat16")])

    traced = fit(strategy_for(2, zero_stage), build, momentum)
    assert_same(fit(strategy_for(2, zero_stage), build, momentum, run_eagerly=True), traced, rtol=3e-2)  # bfloat16 has 8 bits
    assert all(slot.dtype != "bfloat16" for slot in traced.slots.values())
