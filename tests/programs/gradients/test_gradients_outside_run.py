"""Gradients of weights that are taken outside `strategy.run`: whole, whichever part of a weight each device stores."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.programs.comparing import assert_as_on_one_device, stages_in_turns

X = np.random.default_rng(5).normal(size=(8, 6)).astype("float32")
Y = np.random.default_rng(6).normal(size=(8, 1)).astype("float32")
IMAGES = np.random.default_rng(7).normal(size=(4, 8, 8, 3)).astype("float32")
TOKENS = np.array([[1, 2, 2, 0], [3, 1, 0, 0]])


def _mlp(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def _loss(model):
    return tf.reduce_mean((model(X) - Y) ** 2)


def _numbers(gradients):
    return [np.array(tf.convert_to_tensor(gradient)) for gradient in gradients]


def norms_in_a_callback(strategy):
    """Every kind of taking a gradient that a callback may use, in `fit`, outside `scope()` and in it."""
    model, taken = _mlp(strategy), {}

    def in_the_callback(epoch, logs=None):
        weights = model.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            loss = _loss(model)
        taken["eager"] = _numbers(tape.gradient(loss, weights))
        taken["again"] = _numbers(tape.gradient(loss, weights))
        taken["watched"] = _numbers(tape.gradient(loss, tape.watched_variables()))
        taken["names"] = [tuple(watched.shape) for watched in tape.watched_variables()]
        taken["norm"] = float(tf.linalg.global_norm(tape.gradient(loss, weights)))
        taken["of a value"] = [np.array(tape.gradient(loss, weights[0].value))]
        traced = tf.function(lambda: _gradients(model))
        taken["traced"] = _numbers(traced())
        with tf.GradientTape() as tape:
            loss = tf.function(lambda: _loss(model))()
        taken["of a function"] = _numbers(tape.gradient(loss, weights))
        with strategy.scope():
            with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
                tape.watch(weights[0].value)
                loss = _loss(model)
            taken["watched in scope"] = [np.array(tape.gradient(loss, weights[0]))]
            taken["none"] = [tape.gradient(loss, weights[1]) is None]
            with tf.GradientTape() as tape:
                loss = _loss(model)
            taken["in scope"] = _numbers(tape.gradient(loss, weights))
            taken["traced in scope"] = _numbers(tf.function(lambda: _gradients(model))())
            with tf.GradientTape() as tape:
                loss = tf.function(lambda: _loss(model))()
            taken["of a function in scope"] = _numbers(tape.gradient(loss, weights))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights[0] ** 2)
        zeros = tape.gradient(loss, [w.value for w in weights], unconnected_gradients=tf.UnconnectedGradients.ZERO)
        taken["zeros"] = _numbers(zeros)

    callback = keras.callbacks.LambdaCallback(on_epoch_end=in_the_callback)
    model.fit(X, Y, batch_size=4, epochs=1, shuffle=False, verbose=0, callbacks=[callback])
    return taken


def _gradients(model):
    with tf.GradientTape() as tape:
        loss = _loss(model)
    return tape.gradient(loss, model.trainable_variables)


def products_with_the_hessian(strategy):
    """Reverse over reverse, forward over reverse, and a whole Jacobian, eager and traced."""
    model = _mlp(strategy)
    weights = model.trainable_variables
    vectors = [tf.ones(weight.shape) * 0.5 for weight in weights]

    def reverse():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = _loss(model)
            gradients = inner.gradient(loss, weights)
            product = tf.add_n([tf.reduce_sum(g * v) for g, v in zip(gradients, vectors, strict=True)])
        return outer.gradient(product, weights, unconnected_gradients="zero")

    def forward():
        with tf.autodiff.ForwardAccumulator([weight.value for weight in weights], vectors) as accumulator:
            with tf.GradientTape() as tape:
                loss = _loss(model)
            gradients = tape.gradient(loss, weights)
        return [accumulator.jvp(gradient, unconnected_gradients="zero") for gradient in gradients]

    def jacobian():
        with tf.GradientTape() as tape:
            outputs = model(X)[:, 0]
        return tape.jacobian(outputs, weights)

    return {
        f"{what.__name__} {how}": _numbers(call())
        for what in (reverse, forward, jacobian)
        for how, call in (("eager", what), ("traced", tf.function(what)))
    }


def where_a_convolution_looks(strategy):
    """Grad-CAM: the gradient of a class by the feature map of the last convolution, and by its kernel."""
    with strategy.scope():
        inputs = keras.Input((8, 8, 3))
        features = keras.layers.Conv2D(5, 3, activation="relu", name="last")(inputs)
        outputs = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(features))
        model = keras.Model(inputs, outputs)
        both = keras.Model(inputs, [features, outputs])
    with tf.GradientTape(persistent=True) as tape:
        maps, scores = both(IMAGES)
        score = scores[:, 1]
    pooled = tf.reduce_mean(tape.gradient(score, maps), axis=(0, 1, 2))
    return [np.array(pooled), np.array(tape.gradient(score, model.get_layer("last").kernel))]


def loops_branches_and_rows(strategy):
    """Weights that are read in loops, in branches and by rows."""
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Embedding(4, 3, mask_zero=True), keras.layers.LSTM(3), keras.layers.Dense(1, name="head")]
        )
        model.build((None, 4))

    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(TOKENS) ** 2)
        return [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, model.trainable_variables)]

    head = model.get_layer("head")

    @tf.function
    def repeated(turns):
        with tf.GradientTape() as tape:
            total = tf.constant(0.0)
            for _ in tf.range(turns):
                total += tf.reduce_sum(head.kernel**2)
            if turns > 2:
                total += tf.reduce_sum(head.bias)
            mapped = tf.map_fn(lambda x: tf.reduce_sum(x * head.kernel), tf.ones((2, 3, 1)))
            vectorized = tf.vectorized_map(lambda x: tf.reduce_sum(x * head.kernel) ** 2, tf.ones((2, 3, 1)))
            total += tf.reduce_sum(mapped) + tf.reduce_sum(vectorized)
        return tape.gradient(total, [head.kernel, head.bias])

    @tf.function
    def powers(turns):
        power = head.kernel
        for _ in tf.range(turns):
            power = power * head.kernel
        return power

    with tf.GradientTape() as tape:
        power = powers(tf.constant(3))
    outside = tape.gradient(power, head.kernel)
    return [_numbers(gradients()), _numbers(tf.function(gradients)()), _numbers(repeated(tf.constant(3))), _numbers([outside])]


PROGRAMS = [norms_in_a_callback, products_with_the_hessian, where_a_convolution_looks, loops_branches_and_rows]


@pytest.mark.as_traced
@pytest.mark.parametrize(("program", "zero_stage"), list(stages_in_turns(PROGRAMS)))
def test_it_is_that_of_one_device(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)
