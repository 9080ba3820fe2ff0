"""An optimizer's step outside `strategy.run`, with whole gradients: a tutorial's loop, REINFORCE between episodes, Reptile."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from training import BATCH, loss_function, small, vectors

from tests.programs.comparing import assert_as_on_one_device, stages_in_turns

pytestmark = pytest.mark.as_traced

optimizers = keras.optimizers


class Centred(optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        super().apply([g - tf.reduce_mean(g) for g in grads], trainable_variables)


OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.01),
    "clipped": lambda: optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.05, weight_decay=0.01),
    "scaled": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.5, clipnorm=0.05), initial_scale=4.0, dynamic_growth_steps=2
    ),
    "accumulating": lambda: optimizers.SGD(0.5, momentum=0.9, gradient_accumulation_steps=2),
    "averaging": lambda: optimizers.SGD(0.5, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "owned": lambda: optimizers.Lamb(0.01),
    "of its own": lambda: Centred(0.5),
    "several": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.Adam(0.01), {".*scale.*": optimizers.SGD(0.1)})
    ),
}


def gradients(model, x, y, scale):
    with tf.GradientTape() as tape:
        loss = scale(loss_function()(y, model(x)))
    return loss, tape.gradient(loss, model.trainable_variables)


def left(model, optimizer, *others):
    return [*others, model.get_weights(), [variable.numpy() for variable in optimizer.variables]]


@functools.cache
def stepping(name, is_traced=False, is_in_scope=True):
    """A loop that takes each gradient of the whole batch."""

    def program(strategy):
        with strategy.scope():
            model, optimizer = small(), OPTIMIZERS[name]()

        def step(x, y):
            scale = optimizer.scale_loss if name == "scaled" else lambda loss: loss
            loss, grads = gradients(model, x, y, scale)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            return loss

        def loop():
            taken = tf.function(step) if is_traced else step
            return [float(taken(*batch)) for batch in tf.data.Dataset.from_tensor_slices(vectors(4 * BATCH)).batch(BATCH)]

        if is_traced:
            optimizer.build(model.trainable_variables)
        if is_in_scope:
            with strategy.scope():
                losses = loop()
        else:
            losses = loop()
        return left(model, optimizer, losses)

    return program


def reptile(strategy):
    """Numbers as gradients, some of them None, without variables; and steps in `strategy.run` and in `fit` before and behind."""
    x, y = vectors(2 * BATCH)
    with strategy.scope():
        model = small()
        model.compile(optimizers.Adam(0.01), loss_function())
    data = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    first = model.fit(x, y, **data).history
    before = model.get_weights()
    model.fit(x, y, **data)
    after = model.get_weights()
    found = [0.1 * (old - new) for old, new in zip(before, after, strict=True)]
    model.optimizer.apply([tf.constant(found[0]), None, *map(np.asarray, found[2:])])
    model.optimizer.apply_gradients(
        [(tf.IndexedSlices(tf.ones((3, found[-1].shape[1])), [1, 4, 2], found[-1].shape), model.trainable_variables[-1])]
    )
    return left(model, model.optimizer, first, model.fit(x, y, **data).history)


def summed_outside(strategy):
    """Gradients that replicas return, summed by the loop and applied outside."""
    with strategy.scope():
        model, optimizer = small(), optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def on_rank(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x)) / BATCH
        return tape.gradient(loss, model.trainable_variables)

    @tf.function
    def step(x, y):
        grads = strategy.run(on_rank, args=(x, y))
        optimizer.apply([strategy.reduce("SUM", grad, axis=None) for grad in grads], model.trainable_variables)

    batches = tf.data.Dataset.from_tensor_slices(vectors(4 * BATCH)).batch(BATCH)
    for batch in strategy.experimental_distribute_dataset(batches):
        with strategy.scope():
            step(*batch)
    return left(model, optimizer)


def _grid():
    for place, name in enumerate(OPTIMIZERS):
        for stage in range(4):
            yield (name, stage) if stage == 3 * (place % 2) else exhaustive(name, stage)


@pytest.mark.parametrize(("name", "zero_stage"), list(_grid()))
def test_an_eager_loop(name, zero_stage):
    assert_as_on_one_device(stepping(name, is_in_scope=bool(zero_stage % 2)), zero_stage, 3)


@pytest.mark.parametrize(
    ("name", "zero_stage", "is_in_scope"),
    [
        ("adam", 0, True),
        ("clipped", 3, False),
        *(exhaustive(name, stage, stage % 2 == 0) for name in OPTIMIZERS for stage in range(4)),
    ],
)
def test_a_traced_loop(name, zero_stage, is_in_scope):
    assert_as_on_one_device(stepping(name, True, is_in_scope), zero_stage)


@pytest.mark.parametrize(  # `reptile` by default on a mesh: the next test
    ("program", "zero_stage"), [*stages_in_turns([summed_outside], first=1), *(exhaustive(reptile, stage) for stage in range(4))]
)
def test_programs(program, zero_stage):
    assert_as_on_one_device(program, zero_stage)
