"""Clipping by hand and by optimizers, with gradient accumulation, loss scaling and an `apply` of the optimizer's own."""

import functools

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from training import BATCH, small, strategy_for, vectors

import tfdist
from tests.programs.comparing import assert_as_on_one_device

pytestmark = pytest.mark.as_traced


class Own(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        super().apply(tf.clip_by_global_norm(list(grads), 0.3)[0], trainable_variables)


def scaled(optimizer):
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)


def sgd(kind=keras.optimizers.SGD, **arguments):
    return kind(0.1, momentum=0.9, **arguments)


OPTIMIZERS = {
    "accumulation": lambda: sgd(gradient_accumulation_steps=2),
    "accumulation, global_clipnorm": lambda: sgd(gradient_accumulation_steps=2, global_clipnorm=0.3),
    "accumulation, clipvalue": lambda: sgd(gradient_accumulation_steps=2, clipvalue=0.05),
    "own": lambda: sgd(Own),
    "own, accumulation": lambda: sgd(Own, gradient_accumulation_steps=2),
    "scaled, clipnorm": lambda: scaled(sgd(clipnorm=0.1)),
    "scaled, accumulation, global_clipnorm": lambda: scaled(sgd(gradient_accumulation_steps=2, global_clipnorm=0.3)),
    "scaled, own": lambda: scaled(sgd(Own)),
    "scaled, own, accumulation": lambda: scaled(sgd(Own, gradient_accumulation_steps=2)),
}
CLIPS = {
    "none": lambda grads, weights: grads,
    "tfdist": lambda grads, weights: tfdist.clip_by_global_norm(grads, weights, 0.5)[0],
    "TensorFlow": lambda grads, weights: tf.clip_by_global_norm(grads, 0.5)[0],
}


@functools.cache
def trained(name, clip):
    def program(strategy):
        with strategy.scope():
            model, optimizer = small(), OPTIMIZERS[name]()
            optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def on_rank(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
                of_tape = optimizer.scale_loss(loss)
            grads = tape.gradient(of_tape, model.trainable_variables)
            optimizer.apply(CLIPS[clip](grads, model.trainable_variables), model.trainable_variables)
            return loss

        step = tf.function(lambda *batch: strategy.reduce("SUM", strategy.run(on_rank, args=batch), axis=None))
        batches = tf.data.Dataset.from_tensor_slices(vectors(4 * BATCH)).batch(BATCH)
        return [float(step(*b)) for b in strategy.experimental_distribute_dataset(batches)], model.get_weights()

    return program


def _grid():
    """Those that were wrong once; the rest in the exhaustive suite."""
    chosen = {("accumulation", "tfdist", 0), ("accumulation", "tfdist", 1), ("scaled, own, accumulation", "none", 1)}
    for name in OPTIMIZERS:
        for clip in CLIPS:
            for stage in range(4):
                if clip != "tfdist" or "own" not in name or not stage:
                    yield case if (case := (name, clip, stage)) in chosen else exhaustive(*case)


@pytest.mark.parametrize(("name", "clip", "zero_stage"), list(_grid()))
def test_it_is_one_device(name, clip, zero_stage):
    assert_as_on_one_device(trained(name, clip), zero_stage)


@pytest.mark.parametrize(("name", "zero_stage"), [("own", 3), exhaustive("own", 2), exhaustive("own, accumulation", 1)])
def test_an_optimizer_of_ones_own_that_is_given_shards_is_refused(name, zero_stage):
    with pytest.raises(NotImplementedError, match="given shards.*Clip by `tf.clip_by_global_norm`"):
        trained(name, "tfdist")(strategy_for(2, zero_stage))
