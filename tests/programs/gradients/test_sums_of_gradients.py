"""Where ranks' gradients are summed by the user's code, or read by a loop: counted once, at every stage."""

import functools
import itertools
import warnings

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from training import BATCH, small, strategy_for, vectors

from tests.programs.comparing import SHARDED, assert_as_on_one_device
from tfdist.strategy import double_sums

pytestmark = pytest.mark.as_traced


def merged(strategy, grads, weights):
    """Reduced in a merge call, as loops of TensorFlow's first years do."""

    def total(strategy, *grads):
        return [strategy.reduce("SUM", grad, axis=None) for grad in grads]

    return tf.distribute.get_replica_context().merge_call(total, args=tuple(grads))


def merged_with_scale(strategy, grads, weights):
    return merged(strategy, [grad / 4 for grad in grads], weights)


def clipped(strategy, grads, weights):
    """Only returned: on shards as good as on the whole, and not what clipped summands add up to."""
    return [tf.clip_by_value(grad * 0.5, -0.01, 0.01) for grad in grads]


def norms(strategy, grads, weights):
    clipped, norm = tf.clip_by_global_norm(grads, 0.05)
    return [norm, tf.norm(grads[-1], axis=0), tf.linalg.global_norm(clipped)]


def power_iteration(strategy, grads, weights):
    """The largest singular value of the last gradient, by a loop that starts from it."""
    matrix = grads[-1]

    def turn(v):
        v = tf.linalg.matvec(matrix, tf.linalg.matvec(matrix, v), transpose_a=True)
        return (v / (tf.norm(v) + 1e-9),)

    (v,) = tf.while_loop(lambda v: tf.constant(True), turn, (matrix[0] / (tf.norm(matrix[0]) + 1e-9),), maximum_iterations=4)
    return [tf.norm(tf.linalg.matvec(matrix, v)), v]


def clipped_in_a_loop(strategy, grads, weights):
    """Halved until the norm is small, each gradient on its own."""
    halved = [
        tf.while_loop(lambda g: tf.norm(g) > 0.05, lambda g: (g / 2,), (grad,), shape_invariants=(grad.shape,))[0]
        for grad in grads
    ]
    return [*halved, tf.linalg.global_norm(halved)]


USES = {use.__name__: use for use in (merged, merged_with_scale, clipped, norms, power_iteration, clipped_in_a_loop)}


@functools.cache
def used(name, is_traced):
    """What the ranks have is the same on all: the mean of theirs is compared."""

    def program(strategy):
        with strategy.scope():
            model, optimizer = small(), keras.optimizers.SGD(0.1, momentum=0.9)
            optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

        def on_rank(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x)) / BATCH
            grads = tape.gradient(loss, model.trainable_variables)
            found = USES[name](strategy, grads, model.trainable_variables)
            optimizer.apply(grads, model.trainable_variables)
            return found

        def step(x, y):
            found = strategy.run(on_rank, args=(x, y))
            return tf.nest.map_structure(lambda x: strategy.reduce("MEAN", x, axis=None), found)

        step = tf.function(step) if is_traced else step
        batches = tf.data.Dataset.from_tensor_slices(vectors(2 * BATCH)).batch(BATCH)
        found = [
            [x.numpy() for x in tf.nest.flatten(step(*batch))] for batch in strategy.experimental_distribute_dataset(batches)
        ]
        return found, model.get_weights()

    return program


@pytest.mark.parametrize("zero_stage", SHARDED)
@pytest.mark.parametrize(
    "name", ["merged", "clipped", *map(exhaustive, ["merged_with_scale", "power_iteration", "clipped_in_a_loop"])]
)
def test_in_a_traced_step(name, zero_stage):
    assert_as_on_one_device(used(name, is_traced=True), zero_stage, 3)


EAGERLY = [("merged", 0), ("merged", 3), ("merged_with_scale", 1), ("norms", 2), ("norms", 3), ("power_iteration", 3)]


@pytest.mark.parametrize(("name", "zero_stage"), [("norms", 0), *itertools.starmap(exhaustive, EAGERLY)])
def test_in_an_eager_step(name, zero_stage):
    assert_as_on_one_device(used(name, is_traced=False), zero_stage, 2)


@pytest.mark.parametrize(("is_traced", "zero_stage"), [(True, 3), exhaustive(True, 0), exhaustive(True, 2), exhaustive(False, 3)])
def test_summing_what_is_computed_of_sums_is_told(is_traced, zero_stage):
    strategy = strategy_for(2, zero_stage)
    with strategy.scope():
        model = small()

    def on_rank(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        norm, rank = tf.linalg.global_norm(grads), tf.distribute.get_replica_context().replica_id_in_sync_group
        of_first = norm * tf.cast(tf.equal(rank, 0), tf.float32) if is_traced else loss
        return loss, grads, norm, tf.map_fn(lambda row: row * 0.5, grads[-1]), of_first

    def step(x):
        loss, grads, norm, mapped, of_first = strategy.run(on_rank, args=(x,))
        told = []
        for how, value in [("SUM", loss), ("SUM", grads[-1]), ("MEAN", norm), ("SUM", norm), ("SUM", mapped), ("SUM", of_first)]:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                strategy.reduce(how, value, axis=None)
            told.append(any("computed of the gradients of the whole batch" in str(one.message) for one in found))
            double_sums._told.clear()
        assert told == [False, False, False, True, True, False]

    (tf.function(step, autograph=False) if is_traced else step)(tf.ones((4, 15)))


@functools.cache
def returned(is_traced):
    def program(strategy):
        with strategy.scope():
            model = small()
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

        def on_rank(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x)) / BATCH
            grads = tape.gradient(loss, model.trainable_variables)
            return grads, [grad * 0.5 for grad in grads] if is_traced else []

        def step(x, y):
            found = strategy.run(on_rank, args=(x, y))
            return tf.nest.map_structure(lambda x: strategy.reduce("SUM", x, axis=None), found)

        step = tf.function(step) if is_traced else step
        batches = tf.data.Dataset.from_tensor_slices(vectors(BATCH)).batch(BATCH)
        return [tf.nest.flatten(step(*batch)) for batch in strategy.experimental_distribute_dataset(batches)]

    return program


@pytest.mark.parametrize("zero_stage", [0, *map(exhaustive, (1, 2, 3))])  # at stage 3: test_gradients_of_ranks.py
@pytest.mark.parametrize("is_traced", [exhaustive(True), False])
def test_what_is_returned_is_a_summand(is_traced, zero_stage):
    assert_as_on_one_device(returned(is_traced), zero_stage, 2)
