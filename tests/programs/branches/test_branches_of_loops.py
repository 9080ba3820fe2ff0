"""Custom training loops with branches in a step: one of two networks, by the loss, by a condition of the batch; refused loops."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import BATCH, small, strategy_for, vectors

import tfdist
from tests.programs.comparing import assert_as_on_one_device

ROWS = 5 * BATCH - 5  # the last batch is smaller


def adversaries(strategy):
    """A discriminator that learns in every third step, by AutoGraph's `if`; normalized over the batch."""
    with strategy.scope():
        layers = keras.layers
        generator = keras.Sequential(
            [keras.Input((5,)), layers.Dense(9), layers.BatchNormalization(synchronized=True), layers.Dense(15)]
        )
        judge = keras.Sequential([keras.Input((15,)), layers.Dense(9, activation="tanh"), layers.Dense(1)])
        optimizers = [keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.SGD(0.3)]
        for optimizer, model in zip(optimizers, (generator, judge), strict=True):
            optimizer.build(model.trainable_variables)
        loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def on_rank(real, noise, number):
        judged = 0.0
        if number % 3 == 0:
            with tf.GradientTape() as tape:
                true, false = judge(real), judge(generator(noise, training=True))
                judged = loss_of(tf.ones_like(true), true) + loss_of(tf.zeros_like(false), false)
            optimizers[1].apply(tape.gradient(judged, judge.trainable_variables), judge.trainable_variables)
        with tf.GradientTape() as tape:
            false = judge(generator(noise, training=True))
            fooled = loss_of(tf.ones_like(false), false)
        optimizers[0].apply(tape.gradient(fooled, generator.trainable_variables), generator.trainable_variables)
        return judged, fooled

    @tf.function
    def step(real, noise, number):
        return [strategy.reduce("SUM", x, axis=None) for x in strategy.run(on_rank, args=(real, noise, number))]

    batches = tf.data.Dataset.from_tensor_slices((vectors(ROWS)[0], vectors(ROWS)[0][:, :5])).batch(BATCH)
    batches = enumerate(strategy.experimental_distribute_dataset(batches))
    return [[float(x) for x in step(*b, tf.constant(n))] for n, b in batches], generator.get_weights(), judge.get_weights()


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero_stage", range(4))
def test_a_loop(zero_stage):
    assert_as_on_one_device(adversaries, zero_stage)


def numbers_in_a_loop(strategy):
    """What a branch of a loop of one's own has captured: a count that a constant is added to, the loss, and what is assigned."""
    with strategy.scope():
        model = small()
        model.build((None, 15))
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        count, scale = keras.Variable(0, dtype="int32", trainable=False), keras.Variable(1.0, trainable=False)
    weights = model.trainable_variables

    def on_rank(x, y, size):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            loss = tf.reduce_sum(losses) / size
        grads = tape.gradient(loss, weights)
        tokens = tf.reduce_sum(tf.cast(y > 2, tf.float32)) + 1.0
        count.assign_add(1)

        def scaled():
            optimizer.apply([g * 20.0 / tokens for g in grads], weights)

        def by_the_loss():
            scale.assign(0.5 * scale + tf.sqrt(loss))
            optimizer.apply([g * loss * scale for g in grads], weights)

        tf.cond(tf.equal(count % 2, 0), scaled, lambda: tf.cond(loss < 2.5, by_the_loss, lambda: None))
        return loss

    @tf.function
    def step(x, y, size):
        return strategy.reduce("SUM", strategy.run(on_rank, args=(x, y, size)), axis=None)

    x, y = vectors(ROWS)
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    sizes = [float(min(BATCH, ROWS - begin)) for begin in range(0, ROWS, BATCH)]
    losses = [float(step(*batch, tf.constant(size))) for batch, size in zip(batches, sizes, strict=True)]
    return losses, model.get_weights(), [np.asarray(v) for v in optimizer.variables], float(scale)


@pytest.mark.parametrize("zero_stage", (0, exhaustive(1), exhaustive(2), 3))
def test_numbers_in_a_loop(zero_stage):
    assert_as_on_one_device(numbers_in_a_loop, zero_stage)


def applied(strategy, condition):
    """Applies an optimizer, once, where `condition` of a rank's batch is true; a captured batch, which is no argument."""
    with strategy.scope():
        weight = tf.Variable(tf.ones(5))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weight])

    def on_rank(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight) * tf.reduce_sum(x)
        tf.cond(condition(x), lambda: optimizer.apply(tape.gradient(loss, [weight]), [weight]), lambda: None)

    batch = next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(tf.range(1.0, 3.0)))))
    tf.function(lambda: strategy.run(on_rank, args=(batch,)))()
    return weight.numpy()


def by_a_sum(strategy):
    return applied(strategy, lambda x: tf.reduce_sum(x) > 1.5)


def by_rows(strategy):
    return applied(strategy, lambda x: tf.reduce_any(x > 1.5))


@pytest.mark.filterwarnings("error:A loss .* contains:UserWarning")  # a false alarm
@pytest.mark.parametrize("program", (by_a_sum, by_rows))
@pytest.mark.parametrize("zero_stage", (0, exhaustive(1), exhaustive(2), 3))
def test_a_number_of_the_batch_is_a_condition(program, zero_stage):
    """Of one row on each rank, of which the first would not step by its own."""
    assert_as_on_one_device(program, zero_stage)


def by_rank(x):
    del x
    return tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)


def by_python(x):
    return tf.ensure_shape(tf.numpy_function(lambda rows: rows.sum() > 1.5, [x], tf.bool), [])


@pytest.mark.parametrize("condition", (by_rank, by_python))
@pytest.mark.parametrize("zero_stage", (0, exhaustive(1), exhaustive(2), 3))
def test_ranks_that_disagree_are_told(condition, zero_stage):
    with pytest.raises(tf.errors.InvalidArgumentError, match="take different branches of a `tf.cond`.*reduced first"):
        applied(strategy_for(2, zero_stage), condition)


def test_a_number_of_all_ranks_is_a_condition():
    applied(strategy_for(2, 3), lambda x: tfdist.collectives.all_reduce(tf.reduce_sum(x)) > 1.5)


def test_what_all_ranks_share_and_write_is_refused():
    """The branch of one rank would wait for that of the other to end."""
    count, strategy = tf.Variable(0), strategy_for(2, 1)
    with strategy.scope():
        weight = tf.Variable(tf.ones(5))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weight])

    def on_rank():
        def apply():
            count.assign_add(1)
            optimizer.apply([tf.ones(5)], [weight])

        tf.cond(tf.constant(True), apply, lambda: None)

    with pytest.raises(RuntimeError, match="wait for each other for ever: .*strategy.scope"):
        tf.function(lambda: strategy.run(on_rank))()


def test_a_step_in_a_loop_is_refused():
    strategy = strategy_for(2, 1)
    with strategy.scope():
        weight = tf.Variable(tf.ones(5))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weight])

    def on_rank():
        for _ in tf.range(2):
            optimizer.apply([tf.ones(5)], [weight])

    with pytest.raises(RuntimeError, match="in a loop.*Put the loop around|in a loop.*put the loop around"):
        tf.function(lambda: strategy.run(on_rank))()
