"""Gradients that a rank takes of its own rows: of each example, Jacobians, summed by the program, returned from `run`."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import BATCH, small, strategy_for, vectors

import tfdist
from tests.programs.comparing import assert_as_on_one_device

X = np.random.default_rng(5).normal(size=(16, 6)).astype("float32")


def made_small(strategy):
    with strategy.scope():
        return small(), keras.optimizers.SGD(0.1, momentum=0.9)


def clipped_gradients_of_examples(strategy):
    """Differentially private descent: each example's gradient is clipped before the mean."""
    model, optimizer = made_small(strategy)

    def of_example(row):
        x, y = row
        with tf.GradientTape() as tape:
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x[tf.newaxis])[0])
        return tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.5)[0]

    def on_rank(x, y):
        grads = [tf.reduce_sum(g, 0) / BATCH for g in tf.vectorized_map(of_example, (x, y))]
        optimizer.apply(grads, model.trainable_variables)
        return grads

    return loop(strategy, model, on_rank)


class OfExamples(keras.Sequential):
    """The same in a `train_step`: the mean over the examples is taken behind the clipping."""

    def train_step(self, data):
        def of_example(row):
            x, y = row
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x[tf.newaxis], training=True) - y[tf.newaxis]) ** 2)
            return tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.5)[0]

        grads = [tf.reduce_mean(g, 0) for g in tf.vectorized_map(of_example, data)]
        self.optimizer.apply(grads, self.trainable_variables)
        return {"mean": tf.reduce_mean(data[0])}


def clipped_gradients_of_examples_in_fit(strategy):
    with strategy.scope():
        model = OfExamples([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The loss of")
        model.fit(X, X[:, :3], batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


def jacobians(strategy, traced=tf.function):
    model, _ = made_small(strategy)

    def on_rank(x, y):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            outputs = model(x)
            totals = tf.reduce_sum(outputs**2, 0)
        of_inputs = tape.batch_jacobian(outputs, x)
        slowly = tape.jacobian(totals, model.trainable_variables, experimental_use_pfor=False)
        return [*tape.jacobian(totals, model.trainable_variables), *slowly, tf.reduce_sum(of_inputs, 0)]

    return loop(strategy, model, on_rank, traced)


def summed_by_hand(strategy, traced=tf.function):
    """What every framework's first lesson has: all-reduce the gradients, and divide."""
    model, optimizer = made_small(strategy)
    number, loss_of = strategy.num_replicas_in_sync, keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def on_rank(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x))
        grads = tape.gradient(loss, model.trainable_variables)
        half = len(grads) // 2
        summed = list(tf.distribute.get_replica_context().all_reduce("SUM", grads[:half]))
        summed += [tfdist.collectives.all_reduce(g) if number > 1 else g for g in grads[half:]]
        means = [g / number for g in summed]
        optimizer.apply(means, model.trainable_variables)
        return [loss, *means]

    return loop(strategy, model, on_rank, traced)


def loop(strategy, model, on_rank, traced=tf.function):
    """Returns what `on_rank` returns, summed over the ranks, for each of four batches, and the weights."""
    batches = tf.data.Dataset.from_tensor_slices(vectors(4 * BATCH - 5)).batch(BATCH)
    step = traced(lambda *batch: [strategy.reduce("SUM", x, axis=None) for x in strategy.run(on_rank, args=batch)])
    found = [[x.numpy() for x in step(*batch)] for batch in strategy.experimental_distribute_dataset(batches)]
    return found, model.get_weights()


@pytest.mark.as_traced
@pytest.mark.parametrize("zero_stage", (exhaustive(0), exhaustive(1), exhaustive(2), 3))
@pytest.mark.parametrize(
    "program",
    [exhaustive(clipped_gradients_of_examples), clipped_gradients_of_examples_in_fit, jacobians, summed_by_hand],
)
def test_gradients_of_a_rank_are_its_own(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)


@pytest.mark.parametrize("zero_stage", (exhaustive(0), exhaustive(1), exhaustive(2), 3))
@pytest.mark.parametrize("program", [exhaustive(jacobians), summed_by_hand])
def test_gradients_of_an_eager_rank_are_its_own(program, zero_stage):
    def eager(strategy):
        return program(strategy, traced=lambda step: step)

    assert_as_on_one_device(eager, zero_stage)


@pytest.mark.parametrize("collective", ["tfdist", "context"])
def test_summing_what_an_eager_run_has_computed_of_sums_is_refused(collective):
    strategy = strategy_for(2, 3)
    model, _ = made_small(strategy)

    def on_rank():
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones((2, 15))))
        grads = tape.gradient(loss, model.trainable_variables)
        context.all_reduce("SUM", [loss, *grads])
        half = tf.reshape(grads[0] / 2, [-1])
        return tfdist.collectives.all_reduce(half) if collective == "tfdist" else context.all_reduce("SUM", half)

    with pytest.raises(NotImplementedError, match="summed already.*the gradient as it left the tape"):
        strategy.run(on_rank)


def returned_and_read(strategy, traced=tf.function):
    """Gradients, and what is linear in them, are returned to be summed; something else reads their sum."""
    model, optimizer = made_small(strategy)

    def on_rank(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))
            loss = tf.reduce_sum(losses) / BATCH
        grads = tape.gradient(loss, model.trainable_variables)
        halves = [tf.reshape(g / 2, [-1]) for g in grads]
        optimizer.apply(tf.clip_by_global_norm(grads, 0.05)[0], model.trainable_variables)
        flat = tf.concat(halves, axis=0)  # as a program has it that sends or writes one vector
        parts = [*tf.split(flat[:100], 4), *tf.unstack(tf.stack([halves[1][:3], 2.0 * halves[1][:3]])), flat]
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        norm = tf.linalg.global_norm(halves) * tf.cast(tf.equal(rank, 0), tf.float32)
        return [loss, *grads, *halves, *parts, tf.add_n([tf.reduce_sum(h) for h in halves]), norm]

    return loop(strategy, model, on_rank, traced)


@pytest.mark.parametrize("zero_stage", (exhaustive(0), exhaustive(1), exhaustive(2), 3))
def test_what_is_returned_is_a_summand_also_where_the_sum_is_read(zero_stage):
    assert_as_on_one_device(returned_and_read, zero_stage)


def test_a_jacobian_of_other_rows_is_refused():
    def rank_step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = tf.ensure_shape(x, (4, 6))[:3]
        return tape.batch_jacobian(found, tf.ensure_shape(x, (4, 6)))

    strategy = strategy_for(2, 0)
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(8))
    with pytest.raises(ValueError, match="Need first dimension of target shape"):
        tf.function(lambda x: strategy.run(rank_step, args=(x,)))(next(iter(data)))
