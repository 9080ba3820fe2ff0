"""Gradients as papers change them in a `train_step`: two passes, second order, projections, clipping, custom gradients."""

import keras
import pytest
import tensorflow as tf
from grids import exhaustive

from tests.programs.published_steps import assert_without_a_warning, programs_of, sgd
from tests.programs.small_training import adam

pytestmark = pytest.mark.as_traced


def sharpness_aware(model, x, y):
    """Foret et al. 2021: a second gradient where the loss is largest nearby; weights are moved there and back."""
    with tf.GradientTape() as tape:
        loss = model.losses_of(x, y)[0]
    weights = [*model.body.trainable_variables, *model.head.trainable_variables]
    grads = tape.gradient(loss, weights)
    norm = tf.linalg.global_norm(grads)
    moves = [0.05 * g / (norm + 1e-12) for g in grads]
    for weight, move in zip(weights, moves, strict=True):
        weight.assign_add(move)
    with tf.GradientTape() as tape:
        worst = model.losses_of(x, y)[0]
    grads = tape.gradient(worst, weights)
    for weight, move in zip(weights, moves, strict=True):
        weight.assign_sub(move)
    model.optimizer.apply(grads, weights)
    return {"loss": loss, "worst": worst, "norm": norm}


def balanced_gradients(model, x, y):
    """GradNorm (Chen et al. 2018): the weights of losses are trained such that their gradients are equally large."""
    last = model.body.layers[-1].kernel
    with tf.GradientTape(persistent=True) as tape:
        losses = model.losses_of(x, y)
        weighted = [model.scales[place] * loss for place, loss in enumerate(losses)]
        total = tf.add_n(weighted)
        norms = [tf.norm(tape.gradient(loss, last)) for loss in weighted]
        target = tf.stop_gradient(tf.add_n(norms) / 2)
        imbalance = tf.add_n([tf.abs(norm - target) for norm in norms])
    grads = tape.gradient(total, model.nets)
    of_scales = tape.gradient(imbalance, model.scales)
    model.optimizer.apply([*grads, of_scales], [*model.nets, model.scales])
    return {"loss": total, "imbalance": imbalance}


@tf.custom_gradient
def straight_through(x):
    return tf.sign(x), lambda upstream: upstream * tf.cast(tf.abs(x) < 0.7, x.dtype)


def custom_gradients(model, x, y):
    """A custom gradient of a tensor, and one with weights, which are its arguments."""
    layer = model.head.layers[-1]

    @tf.custom_gradient
    def damped(hidden, kernel):
        return hidden @ kernel, lambda upstream: (
            0.5 * tf.matmul(upstream, kernel, transpose_b=True),
            0.3 * tf.matmul(hidden, upstream, transpose_a=True),
        )

    with tf.GradientTape() as tape:
        logits = damped(straight_through(model.body(x)), tf.convert_to_tensor(layer.kernel)) + layer.bias
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
    weights = [*model.body.trainable_variables, *model.head.trainable_variables]
    model.optimizer.apply(tape.gradient(loss, weights), weights)
    return {"loss": loss}


def unconnected_zeros(model, x, y):
    """Gradients of one loss by weights of the other's head, too: zeros, in a dictionary."""
    named = {"nets": [v.value for v in model.nets], "scales": model.scales.value}
    with tf.GradientTape(persistent=True) as tape:
        first, second = model.losses_of(x, y)
    one = tape.gradient(first, named, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    other = tape.gradient(second, named, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    grads = [g + 0.5 * h for g, h in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True)]
    model.optimizer.apply(grads, [*model.nets, model.scales])
    return {"loss": first, "second": second}


def conflicts_projected(model, x, y):
    """PCGrad (Yu et al. 2020): of two tasks' gradients that point apart each loses what is against the other."""
    with tf.GradientTape(persistent=True) as tape:
        first, second = model.losses_of(x, y)
    grads = []
    for weight in model.body.trainable_variables:
        one, other = tape.gradient(first, weight), tape.gradient(second, weight)
        product = tf.reduce_sum(one * other)
        one_projected = one - tf.minimum(product, 0.0) / (tf.reduce_sum(other**2) + 1e-9) * other
        other_projected = other - tf.minimum(product, 0.0) / (tf.reduce_sum(one**2) + 1e-9) * one
        grads.append(one_projected + other_projected)
    model.optimizer.apply(grads, model.body.trainable_variables)
    return {"loss": first, "second": second}


def rates_by_layer(model, x, y):
    """The lower the layer, the slower it learns; the first bias rests."""
    with tf.GradientTape() as tape:
        loss = tf.add_n(model.losses_of(x, y))
    grads = tape.gradient(loss, model.nets)
    scaled = [0.7**place * grad for place, grad in enumerate(reversed(grads))][::-1]
    scaled[1] = tf.zeros_like(scaled[1])
    model.optimizer.apply(scaled, model.nets)
    return {"loss": loss}


def adaptively_clipped(model, x, y):
    """Brock et al. 2021: a unit's gradient is at most a part of its weights' norm."""
    with tf.GradientTape() as tape:
        loss = tf.add_n(model.losses_of(x, y))
    grads = []
    for grad, weight in zip(tape.gradient(loss, model.nets), model.nets, strict=True):
        largest = 0.1 * tf.maximum(tf.norm(weight, axis=0, keepdims=True), 1e-3)
        norm = tf.norm(grad, axis=0, keepdims=True)
        grads.append(tf.where(norm > largest, grad * largest / tf.maximum(norm, 1e-6), grad))
    model.optimizer.apply(grads, model.nets)
    return {"loss": loss}


def adversarial(model, x, y):
    """Goodfellow et al. 2015: trained on rows that are moved along the sign of their gradient."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = model.losses_of(x, y)[0]
    moved = x + 0.1 * tf.sign(tape.gradient(loss, x))
    return _trained_on(model, moved, y, loss)


def adversarial_by_size(model, x, y):
    """As far as the gradient is large: of a mean, of a sum, and of a value for each row, in turns, by features, too."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        hidden = model.body(x)
        values = keras.losses.sparse_categorical_crossentropy(y, model.head(hidden), from_logits=True)
        mean, total = tf.reduce_mean(values), tf.reduce_sum(values)
    moved = x + tape.gradient(mean, x) + 0.1 * tape.gradient(total, x) + 0.1 * tape.gradient(values, x)
    of_features, of_head = tape.gradient(mean, [hidden, model.head.layers[-1].kernel])
    logs = _trained_on(model, moved + tf.reduce_sum(of_features**2, axis=-1, keepdims=True), y, mean)
    return {**logs, "of_head": tf.norm(of_head)}


def _trained_on(model, moved, y, loss):
    with tf.GradientTape() as tape:
        worst = model.losses_of(moved, y)[0]
    weights = [*model.body.trainable_variables, *model.head.trainable_variables]
    model.optimizer.apply(tape.gradient(worst, weights), weights)
    return {"loss": loss, "worst": worst}


def penalized_by_inputs(model, x, y):
    """R1 (Mescheder et al. 2018): the gradient by the inputs is to be small."""
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            outputs = model(x)
            score = tf.reduce_sum(outputs, axis=-1)
        penalty = tf.reduce_mean(tf.reduce_sum(inner.gradient(score, x) ** 2, axis=-1))
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)) + penalty
    weights = [*model.body.trainable_variables, *model.head.trainable_variables]
    model.optimizer.apply(tape.gradient(loss, weights), weights)
    return {"loss": loss, "penalty": penalty}


def seeds_of_gradients(model, x, y):
    """A tape that watches what it is told, asked with gradients of outputs, and one that stops recording in between."""
    kernel = model.head.layers[-1].kernel
    with tf.GradientTape(watch_accessed_variables=False, persistent=True) as tape:
        tape.watch(kernel.value)
        logits = model(x)
        probabilities = tf.nn.softmax(logits)
        with tape.stop_recording():
            weight = tf.reduce_mean(tf.reduce_sum(probabilities**2, axis=-1))
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
    (grad,) = tape.gradient(loss, [kernel], output_gradients=tf.constant(2.0))
    model.optimizer.apply([grad], [kernel])
    return {"loss": loss, "weight": weight}


PROGRAMS = programs_of(
    [
        (sharpness_aware, sgd),
        (balanced_gradients, adam),
        (custom_gradients, sgd),
        (unconnected_zeros, adam),
        (conflicts_projected, sgd),
        (rates_by_layer, sgd),
        (adaptively_clipped, sgd),
        (adversarial, adam),
        (adversarial_by_size, sgd),
        (penalized_by_inputs, adam),
        (seeds_of_gradients, sgd),
    ]
)


@pytest.mark.parametrize(
    ("name", "zero_stage", "devices"),
    [exhaustive(name, stage, devices) for name in PROGRAMS for stage, devices in ((0, 2), (3, 3))],
)
def test_it_is_one_device(name, zero_stage, devices):
    assert_without_a_warning(PROGRAMS[name], zero_stage, devices)
