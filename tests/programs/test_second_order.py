"""Gradients of gradients, weights that are read for each example, and TensorFlow's check of numbers, in steps of one's own."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparing import assert_as_on_one_device, stages_in_turns
from grids import exhaustive
from training import BATCH, small, strategy_for, vectors

import tfdist

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
