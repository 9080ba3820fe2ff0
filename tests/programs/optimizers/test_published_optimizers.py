"""Optimizers as papers describe them, and what a `train_step` keeps and moves by hand in the place of one."""

import keras
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import ops

from tests.programs.published_steps import assert_without_a_warning, program_of, programs_of, sgd
from tests.programs.small_training import adam

pytestmark = pytest.mark.as_traced


def consolidated(model, x, y):
    """Kirkpatrick et al. 2017: squares of gradients are kept, and say how far a weight may go from where it was."""
    with tf.GradientTape() as tape:
        loss = tf.add_n(model.losses_of(x, y))
        total = loss + 0.1 * tf.add_n(
            [tf.reduce_sum(kept * (weight - 0.1) ** 2) for kept, weight in zip(model.kept, model.nets, strict=True)]
        )
    grads = tape.gradient(total, model.nets)
    for kept, grad in zip(model.kept, grads, strict=True):
        kept.assign_add(tf.square(grad))
    model.optimizer.apply(grads, model.nets)
    return {"loss": loss, "total": total, "kept": tf.linalg.global_norm([ops.convert_to_tensor(v) for v in model.kept])}


def momentum_by_hand(model, x, y):
    """No optimizer: velocities and weights are assigned."""
    with tf.GradientTape() as tape:
        loss = tf.add_n(model.losses_of(x, y))
    for kept, weight, grad in zip(model.kept, model.nets, tape.gradient(loss, model.nets), strict=True):
        kept.assign(0.9 * kept + grad)
        weight.assign_sub(0.1 * kept)
    return {"loss": loss}


def teacher_of_averages(model, x, y):
    """Mean teacher (Tarvainen and Valpola 2017): the student follows an average of its own weights."""
    with tf.GradientTape() as tape:
        student = model.body(x)
        kernel, bias, *_ = model.kept
        teacher = tf.tanh(x @ tf.convert_to_tensor(kernel) + tf.convert_to_tensor(bias))
        loss = model.losses_of(x, y)[0] + tf.reduce_mean((student - tf.stop_gradient(teacher)) ** 2)
    weights = [*model.body.trainable_variables, *model.head.trainable_variables]
    model.optimizer.apply(tape.gradient(loss, weights), weights)
    for kept, weight in zip(model.kept, model.body.trainable_variables, strict=False):
        kept.assign(0.9 * kept + 0.1 * weight)
    return {"loss": loss}


def scaled_by_hand(model, x, y):
    """A loss scale of one's own: steps whose gradients are not finite are left out, and the scale halved."""
    with tf.GradientTape() as tape:
        loss = tf.add_n(model.losses_of(x, y))
        scaled = loss * model.number * 1e38 * tf.where(model.optimizer.iterations == 1, 1e3, 1.0)
    grads = [g / (model.number * 1e38) for g in tape.gradient(scaled, model.nets)]
    is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in grads])
    grads = [tf.where(is_finite, g, tf.zeros_like(g)) for g in grads]
    model.optimizer.apply(grads, model.nets)
    model.number.assign(tf.where(is_finite, tf.convert_to_tensor(model.number), model.number / 2))
    return {"loss": loss, "scale": model.number}


class LayerwiseRates(keras.optimizers.SGD):
    """LARS (You et al. 2017): each weight's step is a part of its norm."""

    def update_step(self, gradient, variable, learning_rate):
        ratio = ops.norm(ops.convert_to_tensor(variable)) / (ops.norm(gradient) + 1e-6)
        super().update_step(gradient, variable, learning_rate * ops.where(ratio > 0, ops.minimum(ratio, 10.0), 1.0))


def plain(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.add_n(model.losses_of(x, y)) + tf.reduce_sum(model.scales**2)
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return {"loss": loss}


def accumulating():
    return keras.optimizers.Adam(0.01, epsilon=1e-3, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2)


def layerwise():
    return LayerwiseRates(0.1, momentum=0.9)


PROGRAMS = {
    **programs_of([(consolidated, sgd), (momentum_by_hand, sgd), (teacher_of_averages, adam), (scaled_by_hand, sgd)]),
    "accumulation_and_averages": program_of(plain, accumulating),
    "layerwise_rates": program_of(plain, layerwise),
}


@pytest.mark.parametrize(
    ("name", "zero_stage", "devices"),
    [exhaustive(name, stage, devices) for name in PROGRAMS for stage, devices in ((0, 2), (3, 3))],
)
def test_it_is_one_device(name, zero_stage, devices):
    assert_without_a_warning(PROGRAMS[name], zero_stage, devices)
