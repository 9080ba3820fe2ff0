"""Gradients that a program changes between the tape and the optimizer, or only looks at: in a `train_step`, in an optimizer or
in a custom training loop. One device changes the gradient of the global batch.
"""

import functools

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from training import BATCH, loss_function, small, vectors

from tests.parity.comparison import state
from tests.programs.comparing import assert_as_on_one_device

pytestmark = pytest.mark.as_traced


def centred(grads, weights):
    """Gradient centralization."""
    return [g - tf.reduce_mean(g, axis=list(range(len(g.shape) - 1)), keepdims=True) if len(g.shape) > 1 else g for g in grads]


def clipped_together(grads, weights):
    return tf.clip_by_global_norm(grads, 0.05)[0]


def clipped_one_by_one(grads, weights):
    return [tf.clip_by_norm(g, 0.02) for g in grads]


def clipped_by_value(grads, weights):
    return [tf.clip_by_value(g * 0.5, -0.01, 0.01) for g in grads]


def decayed(grads, weights):
    return [g + 0.1 * tf.convert_to_tensor(w) for g, w in zip(grads, weights, strict=True)]


def masked(grads, weights):
    masks = [tf.cast(tf.random.stateless_uniform(g.shape, [5, 6]) > 0.4, g.dtype) for g in grads]
    return [g * mask for g, mask in zip(grads, masks, strict=True)]


def noisy(grads, weights):
    """Noise that is one and the same on every device."""
    return [g + 0.01 * tf.random.stateless_normal(g.shape, [3, 4]) for g in grads]


def signs(grads, weights):
    return [tf.sign(g) * tf.reduce_mean(tf.abs(g)) for g in grads]


def guarded(grads, weights):
    """What a program does against NaN."""
    return [tf.where(tf.math.is_finite(g), g, tf.zeros_like(g)) for g in grads]


def topmost(grads, weights):
    """The larger half of each gradient's elements (sparsification)."""
    kept = []
    for g in grads:
        flat = tf.reshape(tf.abs(g), [-1])
        least = tf.math.top_k(flat, tf.size(flat) // 2 + 1).values[-1]
        kept.append(tf.where(tf.abs(g) >= least, g, tf.zeros_like(g)))
    return kept


CHANGES = {
    change.__name__: change
    for change in (
        centred, clipped_together, clipped_one_by_one, clipped_by_value, decayed, masked, noisy, signs, guarded, topmost
    )
}  # fmt: skip


class Changing(keras.optimizers.SGD):
    """Changes gradients in an `apply` of its own."""

    change = None

    def apply(self, grads, trainable_variables=None):
        weights = self._trainable_variables if trainable_variables is None else trainable_variables
        super().apply(self.change(list(grads), weights), trainable_variables)


def changing(name, base=Changing):
    return type(f"Changing_{name}", (base,), {"change": staticmethod(CHANGES[name])})


class Model(keras.Sequential):
    """Changes gradients in a `train_step` of its own, and logs their norm."""

    change = None

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        changed = self.change(grads, self.trainable_variables)
        self.optimizer.apply_gradients(zip(changed, self.trainable_variables, strict=True))
        return {"loss": loss, "norm": tf.linalg.global_norm(grads), "changed": tf.linalg.global_norm(changed)}


def fitted(model, **arguments):
    x, y = vectors(5 * BATCH - 5)
    found = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: found.append({k: float(v) for k, v in logs.items()})
    )
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[record], **arguments)
    return found, state(model)


@functools.cache
def in_an_optimizer(name, **compile_arguments):
    def program(strategy):
        with strategy.scope():
            model = small()
            model.compile(changing(name)(0.5, momentum=0.9), loss_function(), **compile_arguments)
        return fitted(model)

    return program


@functools.cache
def in_a_train_step(name, run_eagerly=False):
    def program(strategy):
        with strategy.scope():
            model = type("Own", (Model,), {"change": staticmethod(CHANGES[name])})(small().layers)
            model.build((None, 15))
            model.compile(keras.optimizers.Adam(0.01), loss_function(), run_eagerly=run_eagerly)
        return fitted(model)

    return program


@functools.cache
def in_a_loop(name):
    def program(strategy):
        with strategy.scope():
            model, optimizer = small(), keras.optimizers.SGD(0.5, momentum=0.9)
            optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

        def on_rank(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x)) / BATCH
            grads = tape.gradient(loss, model.trainable_variables)
            changed = CHANGES[name](grads, model.trainable_variables)
            optimizer.apply(changed, model.trainable_variables)
            return loss, tf.linalg.global_norm(grads)

        @tf.function
        def step(x, y):
            loss, norm = strategy.run(on_rank, args=(x, y))
            return strategy.reduce("SUM", loss, axis=None), strategy.reduce("MEAN", norm, axis=None)

        batches = tf.data.Dataset.from_tensor_slices(vectors(4 * BATCH)).batch(BATCH)
        found = [[float(x) for x in step(*batch)] for batch in strategy.experimental_distribute_dataset(batches)]
        return found, model.get_weights()

    return program


def _grid(names, first, every=1):
    """Each of `names` at stages 0 and 3 in turns, or one of `every` few, from `first`; the rest in the exhaustive suite.

    So each change goes through an optimizer or a train step, and four of them through a loop, too.
    """
    for place, name in enumerate(names):
        for stage in range(4):
            is_its_turn = (place + first) % every == 0 and stage == 3 * ((place // every + first) % 2)
            yield (name, stage) if is_its_turn else exhaustive(name, stage)


@pytest.mark.parametrize(("name", "zero_stage"), list(_grid(CHANGES, 1, every=2)))
def test_an_optimizer_with_an_apply_of_its_own(name, zero_stage):
    assert_as_on_one_device(in_an_optimizer(name), zero_stage, 3)


@pytest.mark.parametrize(("name", "zero_stage"), list(_grid(CHANGES, 0, every=2)))
def test_a_train_step(name, zero_stage):
    assert_as_on_one_device(in_a_train_step(name), zero_stage, 2)


@pytest.mark.parametrize(("name", "zero_stage"), list(_grid(CHANGES, 0, every=3)))
def test_a_loop(name, zero_stage):
    assert_as_on_one_device(in_a_loop(name), zero_stage, 2)
