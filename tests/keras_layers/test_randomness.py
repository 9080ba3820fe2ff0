"""Random numbers of the ranks: different, reproducible, and one state for all."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from training import CLASSES, FEATURES, fit, one_device, strategy_for

import tfdist  # noqa: F401  (installs the override)
from tests.devices import assert_same_bits
from tfdist.keras_layers import randomness

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(120)]


def outputs_of(strategy, model, rows, steps=1):
    """Returns, per step, the ranks' outputs in training, for `rows` given to every rank."""

    @tf.function(autograph=False)
    def step():
        return strategy.run(lambda: model(tf.constant(rows), training=True))

    return [[one.numpy() for one in strategy.experimental_local_results(step())] for _ in range(steps)]


def masks(strategy, size=64, steps=1, seed=1):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential([keras.Input((size,)), keras.layers.Dropout(0.5)])
    found = outputs_of(strategy, model, np.ones((2, size), "float32"), steps)
    return [[one > 0 for one in ranks] for ranks in found], model


def test_ranks_draw_different_masks_and_rank_0_that_of_one_device():
    found, model = masks(strategy_for(4, 3), steps=3)
    expected, alone = masks(one_device(), steps=3)
    distinct = {mask.tobytes() for ranks in found for mask in ranks}
    assert len(distinct) == 12
    for ranks, (mask,) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ranks[0], mask)
    state = model.layers[0].seed_generator.state.value
    for component in state.values:
        np.testing.assert_array_equal(component, alone.layers[0].seed_generator.state.numpy())


def test_masks_of_two_ranks_are_independent():
    ((first, second),), _ = masks(strategy_for(2, 0), size=20000)
    assert abs(first.mean() - 0.5) < 0.01
    assert abs(second.mean() - 0.5) < 0.01
    assert abs((first == second).mean() - 0.5) < 0.01


def test_a_seed_gives_the_same_masks_again():
    (first, _), (again, _), (other, _) = (masks(strategy_for(3, 2), steps=2, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_ranks_of_one_data_index_draw_alike():
    """Tensor and pipe peers compute parts of one model copy."""
    strategy = strategy_for(4, 0, tensor_parallel_size=2)
    ((first, peer, second, its_peer),), _ = masks(strategy)
    np.testing.assert_array_equal(first, peer)
    np.testing.assert_array_equal(second, its_peer)
    assert not np.array_equal(first, second)


class Normal(keras.layers.Layer):
    """Draws with `seed`, an integer or None."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def call(self, x):
        return x + keras.random.normal(tf.shape(x), seed=self.seed)


LAYERS = {
    "gaussian noise": (lambda: keras.layers.GaussianNoise(1.0), (9,)),
    "dropout with a seed": (lambda: keras.layers.Dropout(0.5, seed=7), (64,)),
    "spatial dropout": (lambda: keras.layers.SpatialDropout1D(0.5), (3, 64)),
    "dropout in a recurrent layer": (lambda: keras.layers.LSTM(5, dropout=0.5, recurrent_dropout=0.5), (4, 64)),
    "flipped images": (lambda: keras.layers.RandomFlip(), (5, 6, 3)),
    "turned images": (lambda: keras.layers.RandomRotation(0.4), (5, 6, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_draw(name):
    make, shape = LAYERS[name]
    keras.utils.set_random_seed(1)
    strategy = strategy_for(2, 3)
    with strategy.scope():
        model = keras.Sequential([keras.Input(shape), make()])
    images = np.random.default_rng(1).normal(size=(8, *shape)).astype("float32")
    steps = outputs_of(strategy, model, images, 2)
    assert len({one.tobytes() for ranks in steps for one in ranks}) == 4


def test_an_integer_seed_is_a_constant():
    """As in Keras, where each call returns the same numbers."""
    strategy = strategy_for(2, 0)
    model = keras.Sequential([keras.Input((9,)), Normal(3)])
    (first, second), (again, _) = outputs_of(strategy, model, np.zeros((2, 9), "float32"), 2)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, again)


def test_initial_values_are_drawn_once():
    """Also of a layer that is built inside the first step, with a generator for a seed."""
    strategy = strategy_for(2, 0)
    with strategy.scope():
        layer = keras.layers.Dense(5, kernel_initializer=keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(3)))
    first, second = outputs_of(strategy, lambda x, training: layer(x), np.ones((1, 4), "float32"))[0]
    np.testing.assert_array_equal(first, second)
    with one_device().scope():
        alone = keras.random.normal((4, 5), stddev=0.05, seed=keras.random.SeedGenerator(3))
    np.testing.assert_array_equal(layer.kernel, alone)


def test_eager_ranks_draw_different_masks_too():
    strategy = strategy_for(2, 0)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=1)
    first, second = strategy.experimental_local_results(strategy.run(lambda: layer(tf.ones([1, 64]), training=True)))
    assert not np.array_equal(first, second)


def noisy():
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.GaussianNoise(0.1),
            keras.layers.Dense(9, activation="tanh"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(CLASSES),
        ]
    )


@pytest.mark.parametrize(("devices", "zero_stage", "settings"), [(3, 2, {}), (2, 3, {"steps_per_execution": 3})])
def test_training_twice_is_bitwise_equal(devices, zero_stage, settings):
    """Also with several steps per execution, a loop around `strategy.run`."""
    one, other = (
        fit(strategy_for(devices, zero_stage), noisy, lambda: keras.optimizers.SGD(0.1, momentum=0.9), **compiled)
        for compiled in ({}, settings)
    )
    if not settings:
        assert len(one.losses) >= 6
        assert_same_bits(one.losses, other.losses)
    for mine, theirs in zip(one.weights.values(), other.weights.values(), strict=True):
        assert_same_bits(mine, theirs)


def test_the_method_that_keras_draws_seeds_with():
    """Every function of `keras.random` that is given a generator calls `next`; only tfdist replicas get another seed."""
    original = keras.random.SeedGenerator.next._tfdist_original
    assert list(inspect.signature(original).parameters) == ["self", "ordered"]
    assert original.__module__ == "keras.src.random.seed_generator"
    generator = keras.random.SeedGenerator(5)
    np.testing.assert_array_equal(generator.next(), [5, 0])
    before = generator.state.numpy()
    keras.random.uniform((2,), seed=generator)
    np.testing.assert_array_equal(generator.state.numpy() - before, [0, 1])
    folded = [tuple(randomness.fold_in(tf.constant([seed, 4], tf.int64), rank).numpy()) for seed in (1, 2) for rank in (1, 2)]
    assert len(set(folded)) == 4
    assert all(draws == 4 for _, draws in folded)
