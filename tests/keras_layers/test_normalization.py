"""BatchNormalization of a batch that ranks share: synchronized it is that of one device, and no rank without rows spoils it."""

import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from ranks import local, per_rank, trace
from training import CLASSES, FEATURES, assert_same, collect, custom_loop, loss_function, one_device, strategy_for, vectors

from tests.parity.comparison import losses_of_fit
from tfdist.keras_layers.normalization import moments_over_ranks

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(150)]

BATCH, LENGTH = 16, 6  # of 37 examples the last batch has 5, of 33 it has 1: ranks without rows


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def normalised(synchronized=True):
    def build():
        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.BatchNormalization(synchronized=synchronized),
                keras.layers.Dense(9, activation="tanh"),
                keras.layers.BatchNormalization(synchronized=synchronized, momentum=0.7),
                keras.layers.Dense(CLASSES),
            ]
        )

    return build


def renormalised():
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(9, activation="tanh"),
            keras.layers.BatchNormalization(synchronized=True, momentum=0.7, renorm=True),
            keras.layers.Dense(CLASSES),
        ]
    )


def masked():
    """Sentences whose lengths differ: the ranks have different numbers of valid words."""
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(11, 5, mask_zero=True),
            keras.layers.BatchNormalization(synchronized=True, momentum=0.7),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(CLASSES),
        ]
    )


def sentences(size):
    rng = np.random.default_rng(5)
    words = rng.integers(1, 11, size=(size, LENGTH))
    words[np.arange(LENGTH) > (np.arange(size) % BATCH * LENGTH // BATCH)[:, None]] = 0
    return words.astype("int32"), rng.integers(0, CLASSES, size=size)


def train(strategy, build, data, epochs=2, **compile_arguments):
    """Trains the 3 batches in each of the `epochs`."""
    x, y = data
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build()
        model.compile(momentum(), loss_function(), **compile_arguments)
    losses, _ = losses_of_fit(model, x, y, epochs=epochs, batch_size=BATCH, shuffle=False)
    return collect(model, model.optimizer, losses, strategy)


@functools.cache
def synchronized_on_one_device():
    return train(one_device(), normalised(), vectors(33))


@pytest.mark.parametrize(("devices", "zero_stage"), [(4, 2), exhaustive(3, 3)])
def test_synchronized_is_one_device(devices, zero_stage):
    assert_same(train(strategy_for(devices, zero_stage), normalised(), vectors(33)), synchronized_on_one_device())


@pytest.mark.exhaustive  # in `fit`: the test before
def test_synchronized_in_a_loop_of_ones_own():
    expected = custom_loop(one_device(), normalised(), momentum)
    assert_same(custom_loop(strategy_for(2, 3), normalised(), momentum), expected)


def test_synchronized_under_a_mask():
    expected = train(one_device(), masked, sentences(37))
    assert_same(train(strategy_for(3, 0), masked, sentences(37)), expected)


def test_synchronized_renormalization():
    expected = train(one_device(), renormalised, vectors(37))
    assert_same(train(strategy_for(2, 2), renormalised, vectors(37)), expected)


@pytest.mark.parametrize("rows", [(5, 0, 2), (0, 0)], ids=str)
@pytest.mark.parametrize("with_mask", [False, True])
def test_moments_and_their_gradients(rows, with_mask):
    """Far from zero, where E(x^2) - E(x)^2 would have lost all digits."""
    rng = np.random.default_rng(2)
    x = (1000 + rng.normal(size=(sum(rows), 4, 3))).astype("float32")
    mask = rng.uniform(size=(sum(rows), 4)) < 0.6
    slopes = rng.normal(size=(2, 3)).astype("float32")

    def moments_of_rank(x, mask):
        with tf.GradientTape() as tape:
            tape.watch(x)
            moments = moments_over_ranks(x, [0, 1], mask if with_mask else None)
            # Every rank's loss depends on the moments; the ranks' losses add up.
            loss = tf.reduce_sum(slopes * tf.stack(moments)) / len(rows)
        return (*moments, tape.gradient(loss, x))

    layer = keras.layers.BatchNormalization()
    layer.build(x.shape)

    def moments_of_all(x, mask):
        with tf.GradientTape() as tape:
            tape.watch(x)
            moments = layer._moments(x, mask if with_mask else None)
            loss = tf.reduce_sum(slopes * tf.stack(moments))
        return (*moments, tape.gradient(loss, x))

    ends = np.cumsum(rows)[:-1]
    strategy = strategy_for(len(rows), 0)
    parts = [per_rank(strategy, np.split(whole, ends)) for whole in (x, mask)]
    found = local(strategy, trace(strategy, moments_of_rank)(*parts))
    if sum(rows):
        mean, variance, gradient = (one.numpy() for one in moments_of_all(tf.constant(x), tf.constant(mask)))
    else:
        mean, variance, gradient = np.zeros(3), np.zeros(3), x
    for one in found:
        np.testing.assert_array_equal(one[0], found[0][0])
        np.testing.assert_array_equal(one[1], found[0][1])
        np.testing.assert_allclose(one[0], mean, rtol=1e-6)
        np.testing.assert_allclose(one[1], variance, rtol=1e-4)
    np.testing.assert_allclose(np.concatenate([one[2] for one in found]), gradient, atol=1e-5)


def components(model):
    """Returns each variable that is not trainable, with its values on all ranks."""
    return {
        f"{index} {variable.path}": [part.numpy() for part in variable.value.values]
        for index, variable in enumerate(model.non_trainable_variables)
    }


def assert_equal_on_ranks(model):
    for name, (first, *others) in components(model).items():
        for other in others:
            np.testing.assert_array_equal(first, other, err_msg=name)


@pytest.mark.parametrize(("devices", "zero_stage", "settings"), [(2, 3, {"steps_per_execution": 2}), exhaustive(4, 0, {})])
def test_moving_statistics_of_ranks_are_averaged(devices, zero_stage, settings, tmp_path):
    """Of uneven parts and of none: the moving mean is one device's, the moving variance the mean of the ranks' variances.

    What is saved is what every rank has.
    """
    x, y = vectors(33)
    ours = train(strategy_for(devices, zero_stage), normalised(synchronized=False), (x, y), epochs=1, **settings)
    theirs = unsynchronized_on_one_device()
    assert_equal_on_ranks(ours.model)
    found, expected = ours.model.layers[0], theirs.model.layers[0]
    np.testing.assert_allclose(found.moving_mean, expected.moving_mean, rtol=1e-5, atol=1e-6)
    variance = np.ones(FEATURES)
    for batch in (x[:16], x[16:32], x[32:]):
        parts = [part for part in np.array_split(batch, devices) if len(part)]
        mean_of_variances = sum(len(part) * part.var(0) for part in parts) / len(batch)
        variance = variance * found.momentum + mean_of_variances * (1 - found.momentum)
    np.testing.assert_allclose(found.moving_variance, variance, rtol=1e-5)
    assert np.abs(found.moving_variance - expected.moving_variance).max() > 1e-3
    assert np.isfinite(ours.losses).all()
    assert all(np.isfinite(value).all() for value in (*ours.weights.values(), *ours.slots.values()))
    assert_saved_is_what_every_rank_has(ours.model, tmp_path / "w.weights.h5")


@functools.cache
def unsynchronized_on_one_device():
    return train(one_device(), normalised(synchronized=False), vectors(33), epochs=1)


def assert_saved_is_what_every_rank_has(model, path):
    model.save_weights(path)
    plain = normalised(synchronized=False)()
    plain.load_weights(path)
    for variable, parts in zip(plain.non_trainable_variables, components(model).values(), strict=True):
        for part in parts:
            np.testing.assert_array_equal(variable, part)


@pytest.mark.parametrize(("synchronized", "zero_stage"), [(False, 3), (True, 0)])
def test_messages(synchronized, zero_stage):
    """One a step for all statistics, with a weight each; synchronized one a layer each way, and none for statistics."""
    strategy = strategy_for(2, zero_stage)
    trained = train(strategy, normalised(synchronized), vectors(33), epochs=1)
    assert own_messages(strategy) == (
        {
            ("batch_normalization", (1, 3, FEATURES)): 1,
            ("batch_normalization", (1, 3, 9)): 1,
            ("batch_normalization/gradient", (2, 1, 3, 9)): 1,  # nothing trains below the other
        }
        if synchronized
        else {("statistics", (2 * FEATURES + 2 * 9 + 4,)): 1}
    )
    assert_equal_on_ranks(trained.model)
    trained.model.evaluate(*vectors(33), verbose=0)
    assert own_messages(strategy) == {}


def own_messages(strategy):
    records = strategy.last_plan.records[0]
    found = [(record.label, record.shape) for record in records if record.label.startswith(("batch_norm", "statistics"))]
    return {message: found.count(message) for message in found}


def test_private_names_of_batch_normalization():
    original = keras.layers.BatchNormalization._moments._tfdist_original
    assert list(inspect.signature(original).parameters) == ["self", "inputs", "mask"]
    layer = keras.layers.BatchNormalization(axis=1)
    layer.build((None, 4, 3))
    assert layer._reduction_axes == [0, 2]
    called = []
    layer._moments = lambda inputs, mask: called.append(mask) or (tf.zeros([4]), tf.ones([4]))
    layer(tf.ones([2, 4, 3]), training=True)
    assert called == [None]
    np.testing.assert_allclose(layer.moving_variance, np.ones(4))


def test_why_no_rows_need_care():
    """Keras's moments of no rows."""
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    assert np.isnan(layer._moments(tf.zeros([0, 3]), None)[0]).all()
