"""Gradients that come out of nested functions, branches and loops of a step, and are clipped, compared or changed outside.

On one device it makes no difference in which function a line stands.
"""

import functools

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from training import BATCH, loss_function, small, vectors

from tests.programs.comparing import assert_as_on_one_device, stages_in_turns


class Stepping(keras.Sequential):
    def train_step(self, data):
        return {"norm": self.step(*data)}


def gradients_of(model, x, y):
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
        loss = tf.reduce_mean(losses) if isinstance(model, Stepping) else tf.reduce_sum(losses) / BATCH
    return tape.gradient(loss, model.trainable_variables)


def clipped(grads):
    return tf.clip_by_global_norm(grads, 0.05)[0]


def from_a_function(model, optimizer):
    """What every second program has: a helper with a decorator of its own."""
    helper = tf.function(functools.partial(gradients_of, model))

    def step(x, y):
        grads = helper(x, y)
        optimizer.apply(clipped(grads), model.trainable_variables)
        return tf.linalg.global_norm(grads)

    return step


def clipped_in_a_function(model, optimizer):
    @tf.function
    def helper(x, y):
        grads = gradients_of(model, x, y)
        return clipped(grads), tf.linalg.global_norm(grads)

    def step(x, y):
        grads, norm = tf.function(helper)(x, y)
        optimizer.apply(grads, model.trainable_variables)
        return norm

    return step


def stepped_in_a_function(model, optimizer):
    class Trainer(tf.Module):
        @tf.function
        def step(self, x, y):
            grads = gradients_of(model, x, y)
            optimizer.apply([g * tf.sign(tf.norm(g) - 0.01) for g in grads], model.trainable_variables)
            return tf.linalg.global_norm(grads)

    trainer = Trainer()
    return lambda x, y: trainer.step(x, y)


def surgery(model, optimizer):
    """PCGrad: of two tasks' gradients that disagree each loses what is against the other one."""
    helper = tf.function(functools.partial(gradients_of, model))

    def step(x, y):
        first, second = helper(x, y), helper(-x, y)
        dot = tf.add_n([tf.reduce_sum(a * b) for a, b in zip(first, second, strict=True)])
        square = tf.linalg.global_norm(second) ** 2
        factor = tf.minimum(dot, 0.0) / square
        grads = [a - factor * b + b for a, b in zip(first, second, strict=True)]
        optimizer.apply(grads, model.trainable_variables)
        return dot

    return step


def from_a_branch(model, optimizer):
    def step(x, y):
        is_even = tf.equal(optimizer.iterations % 2, 0)
        grads = tf.cond(is_even, lambda: gradients_of(model, x, y), lambda: [2.0 * g for g in gradients_of(model, -x, y)])
        optimizer.apply(clipped(grads), model.trainable_variables)
        return tf.linalg.global_norm(grads)

    return step


def of_a_branch_or_zeros(model, optimizer):
    def step(x, y):
        is_even = tf.equal(optimizer.iterations % 2, 0)
        zeros = [tf.zeros(w.shape) for w in model.trainable_variables]
        more = tf.cond(is_even, lambda: gradients_of(model, -x, y), lambda: zeros)
        grads = [a + b for a, b in zip(gradients_of(model, x, y), more, strict=True)]
        optimizer.apply(clipped(grads), model.trainable_variables)
        return tf.linalg.global_norm(grads)

    return step


def of_one_of_three(model, optimizer):
    """A schedule of losses, one of which is AutoGraph's branch in a loop."""

    def halves(x, y):
        grads = [tf.zeros_like(w) for w in model.trainable_variables]
        for i in tf.range(2):
            if i == 1:
                grads = [s + g for s, g in zip(grads, gradients_of(model, x, y), strict=True)]
        return grads

    def step(x, y):
        branches = [lambda: gradients_of(model, x, y), lambda: gradients_of(model, -x, y), lambda: halves(x, y)]
        grads = tf.switch_case(tf.cast(optimizer.iterations % 3, tf.int32), branches)
        optimizer.apply(clipped(grads), model.trainable_variables)
        return tf.linalg.global_norm(grads)

    return step


def accumulated_in_a_loop(model, optimizer):
    """Two halves of each device's rows, one after the other, to save memory."""

    def step(x, y):
        grads = [tf.zeros(w.shape) for w in model.trainable_variables]
        halves, labels = tf.stack(tf.split(x, 2)), tf.stack(tf.split(y, 2))
        grads = tf.while_loop(
            lambda i, _: i < 2,
            lambda i, sums: (i + 1, [s + g for s, g in zip(sums, gradients_of(model, halves[i], labels[i]), strict=True)]),
            (tf.constant(0), grads),
        )[1]
        optimizer.apply(clipped(grads), model.trainable_variables)
        return tf.linalg.global_norm(grads)

    return step


def of_the_last_turn(model, optimizer):
    """A loop that only passes on what its last turn has."""

    def step(x, y):
        grads = [tf.zeros(w.shape) for w in model.trainable_variables]
        grads = tf.while_loop(
            lambda i, _: i < 3, lambda i, _: (i + 1, gradients_of(model, x * tf.cast(i, x.dtype), y)), (tf.constant(0), grads)
        )[1]
        optimizer.apply(clipped(grads), model.trainable_variables)
        return tf.linalg.global_norm(grads)

    return step


STEPS = {
    step.__name__: step
    for step in (
        from_a_function, clipped_in_a_function, stepped_in_a_function, surgery, from_a_branch, of_a_branch_or_zeros,
        of_one_of_three,
        accumulated_in_a_loop, of_the_last_turn,
    )
}  # fmt: skip


@functools.cache
def in_a_loop(name):
    def program(strategy):
        with strategy.scope():
            model, optimizer = small(), keras.optimizers.SGD(0.5, momentum=0.9)
            optimizer.build(model.trainable_variables)
        on_rank = STEPS[name](model, optimizer)
        step = tf.function(lambda x, y: strategy.reduce("MEAN", strategy.run(on_rank, args=(x, y)), axis=None))
        batches = tf.data.Dataset.from_tensor_slices(vectors(4 * BATCH)).batch(BATCH, drop_remainder=True)
        return [float(step(*batch)) for batch in strategy.experimental_distribute_dataset(batches)], model.get_weights()

    return program


@functools.cache
def in_fit(name):
    def program(strategy):
        with strategy.scope():
            model = Stepping(small().layers)
            model.build((None, 15))
            model.compile(keras.optimizers.Adam(0.01), loss_function())
        model.step = STEPS[name](model, model.optimizer)
        x, y = vectors(4 * BATCH)
        history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=2).history
        return history, model.get_weights()

    return program


@pytest.mark.as_traced
@pytest.mark.parametrize("devices", [2, exhaustive(3)])
@pytest.mark.parametrize(("name", "zero_stage"), list(stages_in_turns(STEPS)))
def test_a_loop(name, zero_stage, devices):
    assert_as_on_one_device(in_a_loop(name), zero_stage, devices)


@pytest.mark.parametrize("zero_stage", [exhaustive(0), exhaustive(1), exhaustive(2), 3])
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("stepped_in_a_function",) else exhaustive(name)
        for name in STEPS
        if name != "of_one_of_three"  # AutoGraph does not look into a `train_step`: Keras calls it as it is
    ],
)
def test_fit(name, zero_stage):
    assert_as_on_one_device(in_fit(name), zero_stage)
