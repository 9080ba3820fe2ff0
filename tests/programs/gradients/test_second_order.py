"""Gradients of gradients, weights that are read for each example, and TensorFlow's check of numbers, in custom steps."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive

from tests.programs.comparing import assert_as_on_one_device, stages_in_turns

X = np.random.default_rng(5).normal(size=(16, 6)).astype("float32")


def made(strategy):
    """Returns a model of three layers and an optimizer."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), *(keras.layers.Dense(units, "tanh") for units in (5, 4, 3))])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
    return model, optimizer


def run_steps(strategy, model, rank_step):
    step = tf.function(lambda x: strategy.reduce("SUM", strategy.run(rank_step, args=(x,)), axis=None))
    losses = [float(step(x)) for x in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(8))]
    return losses, model.get_weights()


def share(y):
    return tf.reduce_sum(y**2) / 8


def net(weights, x):
    for kernel, bias in zip(weights[::2], weights[1::2], strict=True):
        x = tf.tanh(x @ kernel + bias)
    return x


def product_of_the_hessian(strategy):
    """The second gradient of what the first one is, in whatever shape it comes."""
    model, optimizer = made(strategy)

    def rank_step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = share(model(x, training=True))
            gradients = inner.gradient(loss, model.trainable_variables)
        products = outer.gradient(gradients, model.trainable_variables, [0.5 * tf.ones_like(g) for g in gradients])
        optimizer.apply(products, model.trainable_variables)
        return loss

    return run_steps(strategy, model, rank_step)


def product_of_the_hessian_and_the_gradient(strategy):
    """Not linear in the gradient, which at stages 0 to 2 is the rank's own."""
    model, optimizer = made(strategy)

    def rank_step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = share(model(x, training=True))
            gradients = inner.gradient(loss, model.trainable_variables)
        optimizer.apply(outer.gradient(gradients, model.trainable_variables, gradients), model.trainable_variables)
        return loss

    return run_steps(strategy, model, rank_step)


def test_the_gradient_of_the_global_batch_may_be_the_vector():
    assert_as_on_one_device(product_of_the_hessian_and_the_gradient, 3)


def product_of_the_hessian_and_a_vector(strategy):
    """A vector of the weights' shapes: of weights that were read before the tapes' gradients."""
    model, optimizer = made(strategy)

    def rank_step(x):
        with tf.GradientTape() as outer:
            weights = [tf.convert_to_tensor(variable) for variable in model.trainable_variables]
            vector = [tf.stop_gradient(tf.sin(weight)) for weight in weights]
            with tf.GradientTape() as inner:
                inner.watch(weights)
                loss = share(net(weights, x))
            gradients = inner.gradient(loss, weights)
        optimizer.apply(outer.gradient(gradients, model.trainable_variables, vector), model.trainable_variables)
        return loss

    return run_steps(strategy, model, rank_step)


class StepsAlongTheHessian(keras.Sequential):
    """A `train_step` of one's own, whose loss is the rank's mean."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(self(x, training=True) ** 2)
            gradients = inner.gradient(loss, self.trainable_variables)
        products = outer.gradient(gradients, self.trainable_variables, [tf.ones_like(g) for g in gradients])
        self.optimizer.apply(products, self.trainable_variables)
        return {"loss": loss}


def fitted(kind, strategy, rows=None):
    with strategy.scope():
        model = kind([keras.Input((6,)), *(keras.layers.Dense(units, "tanh") for units in (5, 3))])
        model.compile(keras.optimizers.SGD(0.1))
    return model.fit(X[:rows], X[:rows], batch_size=6, shuffle=False, verbose=0).history["loss"], model.get_weights()


def product_of_the_hessian_in_fit(strategy):
    return fitted(StepsAlongTheHessian, strategy)


class NormsOfGradients(keras.Sequential):
    """Norms of the gradients of the batch and of each weight in a loss: added to it, times it, and times rows."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                found = self(x, training=True)
                loss = tf.sqrt(tf.reduce_mean(found**2))
            by_rows, *by_weights = inner.gradient(loss, [x, *self.trainable_variables])
            norms = tf.add_n([tf.norm(g) for g in by_weights])
            total = loss + tf.norm(by_rows) + norms * (loss + tf.reduce_mean(found[:, 0]))
        self.optimizer.apply(outer.gradient(total, self.trainable_variables), self.trainable_variables)
        return {"loss": total}


def norms_of_gradients_in_fit(strategy):
    return fitted(NormsOfGradients, strategy)


class DerivativesByInputs(keras.Sequential):
    """Each row's Jacobian by its inputs, as a physics-informed loss has it."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                found = self(x, training=True)
            loss = tf.reduce_mean(found**2) + tf.sqrt(tf.reduce_mean(inner.batch_jacobian(found, x) ** 2))
        self.optimizer.apply(outer.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def derivatives_by_inputs_in_fit(strategy):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*contains")
        return fitted(DerivativesByInputs, strategy, rows=13)  # one row in the last batch


def derivatives_by_inputs(strategy):
    model, optimizer = made(strategy)

    def rank_step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                found = model(x, training=True)
            loss = share(found) + share(inner.batch_jacobian(found, x))
        optimizer.apply(outer.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*contains")
        return run_steps(strategy, model, rank_step)


def weights_assigned_by_hand(strategy):
    """Three gradients, of which each is of the weights that the one before was added to."""
    model, _ = made(strategy)
    with strategy.scope():
        momenta = [tf.Variable(tf.zeros(w.shape), trainable=False) for w in model.trainable_variables]

    def rank_step(x):
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = share(model(x, training=True))
            for weight, momentum, g in zip(
                model.trainable_variables, momenta, tape.gradient(loss, model.trainable_variables), strict=True
            ):
                momentum.assign(0.9 * momentum + g / (1.0 + tf.norm(g)))
                weight.assign_sub(0.1 * momentum)
        return loss

    return run_steps(strategy, model, rank_step), [momentum.numpy() for momentum in momenta]


def weights_read_for_each_example(strategy):
    model, optimizer = made(strategy)

    def rank_step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.vectorized_map(lambda row: share(model(row[tf.newaxis], training=True)), x))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return run_steps(strategy, model, rank_step)


def adaptation_to_each_task(strategy):
    """MAML: a step of each task's own, and the gradient of what comes after it."""
    model, optimizer = made(strategy)

    def rank_step(x):
        with tf.GradientTape() as tape:

            def of_task(row):
                weights = [tf.convert_to_tensor(variable) for variable in model.trainable_variables]
                with tf.GradientTape() as inner:
                    inner.watch(weights)
                    loss = share(net(weights, row[tf.newaxis]))
                adapted = [w - 0.3 * g for w, g in zip(weights, inner.gradient(loss, weights), strict=True)]
                return share(net(adapted, row[tf.newaxis, ::-1]))

            loss = tf.reduce_sum(tf.vectorized_map(of_task, x))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return run_steps(strategy, model, rank_step)


def numbers_are_checked(strategy):
    tf.debugging.enable_check_numerics()
    try:
        model, optimizer = made(strategy)
        with strategy.scope():
            model.compile(optimizer, "mse")
        return model.fit(X, X[:, :3], batch_size=8, shuffle=False, verbose=0).history["loss"], model.get_weights()
    finally:
        tf.debugging.disable_check_numerics()


PROGRAMS = [
    product_of_the_hessian,
    product_of_the_hessian_and_a_vector,
    product_of_the_hessian_in_fit,
    weights_read_for_each_example,
    adaptation_to_each_task,
    numbers_are_checked,
    norms_of_gradients_in_fit,
    derivatives_by_inputs_in_fit,
    derivatives_by_inputs,
    weights_assigned_by_hand,
]


@pytest.mark.as_traced
@pytest.mark.parametrize("group_bytes", [0, exhaustive(2**20)])
@pytest.mark.parametrize(("program", "zero_stage"), list(stages_in_turns(PROGRAMS, first=1)))
def test_as_on_one_device(program, zero_stage, group_bytes):
    assert_as_on_one_device(program, zero_stage, group_bytes=group_bytes)
