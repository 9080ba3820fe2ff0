"""Convolutions and poolings on ranks without rows: training, evaluation and prediction are those of one device."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras_owners import nn
from ranks import local, per_rank, trace
from training import CLASSES, assert_same, collect, loss_function, one_device, strategy_for

from tests.parity.comparison import losses_of_fit
from tfdist.keras_hooks import TABLE, layers

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(120)]

ROWS, BATCH = 17, 8  # the last batch has 1 row


def images():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((11, 9, 3)),
            layers.Conv2D(5, 3, activation="relu"),
            layers.BatchNormalization(synchronized=True, momentum=0.7),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.MaxPooling2D(2),
            layers.SeparableConv2D(4, 2, activation="relu"),
            layers.Conv2DTranspose(3, 3, strides=2),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )


def sequences():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((9, 3)),
            layers.Conv1D(5, 3, padding="causal", activation="relu"),
            layers.MaxPooling1D(2),
            layers.Reshape((4, 5, 1, 1)),
            layers.Conv3D(3, (2, 2, 1)),
            layers.Reshape((2, 6, 3)),
            layers.TimeDistributed(layers.Conv1D(2, 2)),
            layers.GlobalMaxPooling2D(),
            layers.Dense(CLASSES),
        ]
    )


def train(strategy, build, infers):
    """Fits 6 batches and, if it `infers`, evaluates and predicts; all that these return stands in the losses."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.03, momentum=0.9), loss_function(), metrics=["accuracy"])
    x = np.random.default_rng(1).normal(size=(ROWS, *model.input_shape[1:])).astype("float32")
    y = np.arange(ROWS) % CLASSES
    arguments = {"batch_size": BATCH, "verbose": 0}
    numbers, history = losses_of_fit(model, x, y, epochs=2, shuffle=False, batch_size=BATCH)
    numbers += history["accuracy"]
    if infers:
        numbers += [*model.evaluate(x, y, **arguments), *model.predict(x[:1], **arguments).ravel()]
    return collect(model, model.optimizer, numbers, strategy)


@pytest.mark.parametrize(
    ("build", "devices", "zero_stage", "infers"),
    [(images, 2, 3, False), exhaustive(images, 2, 3, True), (sequences, 2, 0, True)],
)
def test_it_is_one_device(build, devices, zero_stage, infers):
    actual, expected = train(strategy_for(devices, zero_stage), build, infers), train(one_device(), build, infers)
    # The predictions cross zero: absolutely.
    (ours, mine), (theirs, whole) = ((one.losses[:10], one.losses[10:]) for one in (actual, expected))
    np.testing.assert_allclose(mine, whole, atol=2e-5)
    actual.losses, expected.losses = ours, theirs
    assert_same(actual, expected)


GUARDED = {row.name for row in TABLE.rows if row.binding is layers._fed_with_rows}
OPERATIONS = {
    "conv": ((4, 4, 2), (2, 2, 2, 3), lambda x, kernel: nn.conv(x, kernel)),
    "conv_transpose": ((4, 4, 2), (2, 2, 3, 2), lambda x, kernel: nn.conv_transpose(x, kernel)),
    "depthwise_conv": ((4, 4, 2), (2, 2, 2, 1), lambda x, kernel: nn.depthwise_conv(x, kernel)),
    "separable_conv": ((4, 4, 2), (2, 2, 2, 1), lambda x, kernel: nn.separable_conv(x, kernel, tf.ones([1, 1, 2, 3]))),
    "max_pool": ((4, 4, 2), (), lambda x, kernel: nn.max_pool(x * kernel, (2, 2))),
    "average_pool": ((4, 4, 2), (), lambda x, kernel: nn.average_pool(x * kernel, (2, 2))),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    """With and without rows; in a step that is traced once for both."""
    inner, kernel_shape, operation = OPERATIONS[name]
    assert set(OPERATIONS) == GUARDED
    rng = np.random.default_rng(2)
    kernel = tf.constant(rng.normal(size=kernel_shape).astype("float32"))

    def results(x):
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            outputs = operation(x, kernel)
            loss = tf.reduce_sum(outputs**2)
        return outputs, *tape.gradient(loss, [x, kernel])

    strategy = strategy_for(3, 0)
    step = trace(strategy, lambda x: results(tf.ensure_shape(tf.identity(unknown_rows(x)), (None, *inner))))
    x = rng.normal(size=(3, *inner)).astype("float32")
    found = local(strategy, step(per_rank(strategy, [x[:2], x[:0], x[2:]])))
    expected = [one.numpy() for one in results(tf.constant(x))]
    assert found[1][0].shape == (0, *expected[0].shape[1:])
    assert not found[1][2].any()
    outputs, gradients, kernel_gradients = zip(*found, strict=True)
    np.testing.assert_allclose(np.concatenate(outputs), expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.concatenate(gradients), expected[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sum(kernel_gradients), expected[2], rtol=1e-5)


def unknown_rows(x):
    return tf.compat.v1.placeholder_with_default(x, (None, *x.shape[1:]))


@pytest.mark.parametrize(("devices", "rows", "branches"), [(2, 4, 0), (2, None, 4), (1, None, 0)])
def test_branches_stand_only_where_rows_may_lack(devices, rows, branches):
    strategy = strategy_for(devices, 0)
    x = np.ones((4, 4, 4, 2), "float32")

    def pool(x):
        return nn.max_pool(x if rows else unknown_rows(x), (2, 2))

    graph = trace(strategy, pool).get_concrete_function(per_rank(strategy, [x] * devices)).graph
    assert sum(operation.type in ("If", "StatelessIf") for operation in graph.get_operations()) == branches


@pytest.mark.parametrize("name", sorted(GUARDED))
def test_functions_that_are_overridden(name):
    function = getattr(keras.ops, name)
    assert f"nn.{name}(" in inspect.getsource(function)
    original = getattr(nn, name)._tfdist_original
    assert original.__module__ == nn.__name__
    assert next(iter(inspect.signature(original).parameters)) == "inputs"
