"""Accumulation by hand: variables to which a loop adds gradients, and an optimizer that is applied every few steps."""

import functools

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from training import BATCH, small, vectors

from tests.programs.comparing import SHARDED, assert_as_on_one_device

pytestmark = pytest.mark.as_traced


def in_tensorflow(weight):
    return tf.Variable(tf.zeros(weight.shape), trainable=False)


def in_keras(weight):
    return keras.Variable(tf.zeros(weight.shape), trainable=False)


@functools.cache
def in_a_loop(make):
    return functools.wraps(make)(lambda strategy: _in_a_loop(strategy, make))


def _in_a_loop(strategy, make):
    with strategy.scope():
        model, optimizer = small(), keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
        sums = [make(weight) for weight in model.trainable_variables]
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    @tf.function
    def step(x, y):
        def on_rank(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x)) / BATCH
            for total, grad in zip(sums, tape.gradient(loss, model.trainable_variables), strict=True):
                total.assign_add(grad)
            return loss

        return strategy.reduce("SUM", strategy.run(on_rank, args=(x, y)), axis=None)

    @tf.function
    def apply():
        def on_rank():
            optimizer.apply([total / 2 for total in sums], model.trainable_variables)
            for total in sums:
                total.assign(tf.zeros_like(total))

        strategy.run(on_rank)

    losses = []
    batches = tf.data.Dataset.from_tensor_slices(vectors(4 * BATCH)).batch(BATCH)
    for number, batch in enumerate(strategy.experimental_distribute_dataset(batches)):
        losses.append(float(step(*batch)))
        if number % 2:
            apply()
    return losses, model.get_weights(), [variable.numpy() for variable in optimizer.variables]


@pytest.mark.parametrize("zero_stage", SHARDED)
@pytest.mark.parametrize("make", [exhaustive(in_tensorflow), in_keras])
def test_in_a_loop(make, zero_stage):
    assert_as_on_one_device(in_a_loop(make), zero_stage)


def by_hand(strategy):
    """Gradient descent without an optimizer, as TensorFlow's first tutorial has it, and a sum of what was descended."""
    with strategy.scope():
        kernel, bias = tf.Variable(tf.fill((15, 7), 0.1)), tf.Variable(tf.zeros(7))
        total = tf.Variable(tf.zeros((15, 7)), trainable=False)

    def on_rank(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ kernel + bias)) / BATCH
        of_kernel, of_bias = tape.gradient(loss, [kernel, bias])
        total.assign_add(0.5 * of_kernel)
        kernel.assign_sub(0.1 * of_kernel)
        bias.assign_sub(0.1 * of_bias)
        return loss, total.read_value()

    @tf.function
    def step(x, y):
        return [strategy.reduce("SUM", value, axis=None) for value in strategy.run(on_rank, args=(x, y))]

    batches = tf.data.Dataset.from_tensor_slices(vectors(4 * BATCH)).batch(BATCH)
    found = [[value.numpy() for value in step(*b)] for b in strategy.experimental_distribute_dataset(batches)]
    return found, kernel.numpy(), bias.numpy()


@pytest.mark.parametrize("zero_stage", [0, *map(exhaustive, (1, 2, 3))])
def test_without_an_optimizer(zero_stage):
    assert_as_on_one_device(by_hand, zero_stage)


def in_the_graphs_loop(strategy):
    """The gradients of a `tf.while_loop`, and those of the round before, written to parameters by hand."""
    with strategy.scope():
        kernel, bias = tf.Variable(tf.fill((15, 7), 0.1)), tf.Variable(tf.zeros(7))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    @tf.function
    def step(x, y):
        def on_rank(x, y):
            def rounds(number, of_kernel, of_bias, before):
                with tf.GradientTape() as tape:
                    loss = loss_of(y, x @ kernel + bias) * (1.0 + tf.cast(number, tf.float32)) / BATCH
                grads = tape.gradient(loss, [kernel, bias])
                return number + 1, of_kernel + grads[0], of_bias + grads[1], grads[1] + 0.5 * before

            start = (0, tf.zeros((15, 7)), tf.zeros(7), tf.zeros(7))
            _, of_kernel, of_bias, before = tf.while_loop(lambda number, *_: number < 3, rounds, start)
            kernel.assign_sub(0.1 * of_kernel)
            bias.assign_sub(0.1 * tf.clip_by_norm(of_bias, 0.5) + 0.1 * before)

        strategy.run(on_rank, args=(x, y))

    for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(vectors(2 * BATCH)).batch(BATCH)):
        step(*batch)
    return [], [kernel.numpy(), bias.numpy()], []


@pytest.mark.parametrize("zero_stage", [0, exhaustive(1), exhaustive(2), 3])
def test_in_the_graphs_loop(zero_stage):
    assert_as_on_one_device(in_the_graphs_loop, zero_stage)
