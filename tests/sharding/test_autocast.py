"""Mixed precision: weights and gradients travel in the compute dtype, masters and slots stay float32."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import FEATURES, fit, one_device, strategy_for, vectors

HALF = {"mixed_bfloat16": tf.bfloat16, "mixed_float16": tf.float16}


def build(policy):
    """A half-precision layer with weights of odd sizes, one that Keras keeps in float32, and one of another policy."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(33, activation="tanh", name="hidden", dtype=policy),
            keras.layers.LayerNormalization(name="norm", dtype=policy),
            keras.layers.Dense(7, name="head", dtype="float32"),
        ]
    )


def step_of(strategy, policy):
    """Traces a step and returns rank 0's messages: (label, dtype, bytes) of those that carry weights or gradients."""
    with strategy.scope():
        model = build(policy)
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)

    def on_rank(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(model(x, training=True), tf.float32) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        assert all(grad.dtype == tf.float32 for grad in grads)
        optimizer.apply(grads, model.trainable_variables)

    tf.function(lambda x: strategy.run(on_rank, args=(x,))).get_concrete_function(tf.zeros((4, FEATURES)))
    assert {variable.dtype for variable in model.variables} == {"float32"}
    assert {variable.value.dtype for variable in optimizer.variables[1:]} == {tf.float32}
    return [
        (record.label, record.dtype, int(np.prod(record.shape)) * tf.as_dtype(record.dtype).size)
        for record in strategy.last_plan.records[0]
    ]


@pytest.mark.parametrize("policy", HALF)
def test_half_the_bytes(policy):
    half = dict((label, (dtype, size)) for label, dtype, size in step_of(strategy_for(2, 3), policy))
    full = dict((label, (dtype, size)) for label, dtype, size in step_of(strategy_for(2, 3), "float32"))
    assert list(half) == list(full), "other messages than in float32"
    for label, (dtype, size) in half.items():
        is_half = label.startswith(("unshard/hidden", "reduce_scatter/hidden"))
        assert tf.as_dtype(dtype).size == (2 if is_half else 4), label
        assert size * (2 if is_half else 1) == full[label][1], label
    assert sum(label.endswith(("hidden", "hidden/backward")) for label in half) >= 2


def test_reduce_dtype_is_what_gradients_travel_in():
    messages = step_of(strategy_for(2, 3, reduce_dtype="float32"), "mixed_bfloat16")
    sizes = [tf.as_dtype(dtype).size for label, dtype, _ in messages if label.startswith("reduce_scatter")]
    assert sizes == [4] * 3
    gathered = [tf.as_dtype(dtype).size for label, dtype, _ in messages if label == "unshard/hidden"]
    assert gathered == [2]


def test_sums_are_wider_than_what_travels():
    """The ranks' bfloat16 gradients are added in float32: the sum of 1 and 1/256 is not rounded."""
    strategy = strategy_for(2, 3)
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, dtype="mixed_bfloat16")
        layer.build((None, 1))

    def on_rank(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(layer(x), tf.float32))
        return tf.abs(
            tf.reduce_sum(tape.gradient(loss, layer.kernel))
        )  # of the sum: what is linear in it would be the rank's own

    data = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(tf.constant([[1.0], [2.0**-9]]))))
    sums = strategy.experimental_local_results(tf.function(lambda: strategy.run(on_rank, args=(next(data),)))())
    assert [float(found) for found in sums] == [1 + 2.0**-9] * 2


def trained(strategy, policy):
    def sgd():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**8)

    return fit(strategy, lambda: build(policy), sgd)


@functools.cache
def trained_on_one_device(policy):
    return trained(one_device(), policy)


@pytest.mark.as_traced
@pytest.mark.parametrize(
    ("policy", "zero_stage"),
    [
        ("mixed_bfloat16", 0),
        exhaustive("mixed_bfloat16", 2),
        ("mixed_bfloat16", 3),
        exhaustive("mixed_float16", 0),
        ("mixed_float16", 2),
        ("mixed_float16", 3),
    ],
)
def test_training_follows_one_device(policy, zero_stage):
    """As closely as half precision allows: the ranks' gradients are rounded one by one, one device's is rounded once."""
    ours, theirs = trained(strategy_for(3, zero_stage), policy), trained_on_one_device(policy)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=0.01)
    for mine, reference in zip(ours.weights.values(), theirs.weights.values(), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=0, atol=0.01 * max(np.abs(reference).max(), 0.1))


def test_a_read_outside_the_layer_is_not_rounded():
    strategy = strategy_for(2, 3)
    with strategy.scope():
        layer = keras.layers.Dense(3, dtype="mixed_bfloat16")
        layer.build((None, FEATURES))

    def on_rank(x):
        rounded = layer(x)
        return rounded, tf.convert_to_tensor(layer.kernel)

    x = tf.constant(vectors()[0][:4])
    outputs = tf.function(lambda: strategy.run(on_rank, args=(x,)))()
    for rounded, kernel in zip(*map(strategy.experimental_local_results, outputs), strict=True):
        assert (rounded.dtype, kernel.dtype) == (tf.bfloat16, tf.float32)
        np.testing.assert_array_equal(kernel, layer.kernel.numpy())
