"""Losses as papers describe them, in a `train_step`: weights that are trained, constraints, policies, world models."""

import pytest
import tensorflow as tf
from grids import exhaustive

from tests.programs.published_steps import assert_without_a_warning, programs_of, sgd
from tests.programs.small_training import adam

pytestmark = pytest.mark.as_traced


def uncertainty_weighted(model, x, y):
    """Kendall et al. 2018."""
    with tf.GradientTape() as tape:
        losses = model.losses_of(x, y)
        total = tf.add_n([tf.exp(-model.scales[i]) * loss + model.scales[i] for i, loss in enumerate(losses)])
    weights = [*model.nets, model.scales]
    model.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
    return {"loss": total, "scale": model.scales[0]}


def constrained(model, x, y):
    """A multiplier rises by gradient ascent while a constraint on the second loss is hurt."""
    with tf.GradientTape(persistent=True) as tape:
        first, second = model.losses_of(x, y)
        total = first + tf.nn.softplus(model.scales[0]) * (second - 0.3)
    weights = [*model.nets, model.scales]
    *grads, of_multiplier = tape.gradient(total, weights)
    model.optimizer.apply([*grads, -of_multiplier], weights)
    return {"loss": total, "multiplier": model.scales[0]}


def proximal_policy(model, x, y):
    """PPO's clipped ratio, a value loss and an entropy; three passes over the batch."""
    advantages, logs = x[:, 0], {}
    before = tf.gather(tf.nn.log_softmax(model(x)), y, batch_dims=1)
    for turn in range(2):
        with tf.GradientTape() as tape:
            hidden = model.body(x)
            policy = tf.nn.log_softmax(model.head(hidden))
            ratio = tf.exp(tf.gather(policy, y, batch_dims=1) - tf.stop_gradient(before))
            surrogate = tf.minimum(ratio * advantages, tf.clip_by_value(ratio, 0.9, 1.1) * advantages)
            value = tf.reduce_mean((model.other(hidden)[:, 0] - advantages) ** 2)
            entropy = -tf.reduce_mean(tf.reduce_sum(tf.exp(policy) * policy, axis=-1))
            loss = -tf.reduce_mean(surrogate) + 0.5 * value - 0.01 * entropy
        model.optimizer.apply(tape.gradient(loss, model.nets), model.nets)
        logs[f"loss_{turn}"] = loss
    return logs


def imagined(model, x, y):
    """A world model: unrolled from its own states, with a divergence between what it expects and what it sees."""
    with tf.GradientTape() as tape:
        hidden, total = tf.zeros_like(x), 0.0
        for _ in range(3):
            state = model.body(x + hidden)
            prior, posterior = model.head(state), model.other(state)
            total += tf.reduce_mean(tf.reduce_sum((prior - posterior) ** 2 + tf.exp(posterior) - posterior, axis=-1))
            hidden = tf.concat([posterior, prior[:, :2]], axis=-1)
    model.optimizer.apply(tape.gradient(total, model.nets), model.nets)
    return {"loss": total}


PROGRAMS = programs_of(
    [
        (uncertainty_weighted, adam),
        (constrained, sgd),
        (proximal_policy, adam),
        (imagined, adam),
    ]
)


@pytest.mark.parametrize(
    ("name", "zero_stage", "devices"),
    [exhaustive(name, stage, devices) for name in PROGRAMS for stage, devices in ((0, 2), (3, 3))],
)
def test_it_is_one_device(name, zero_stage, devices):
    assert_without_a_warning(PROGRAMS[name], zero_stage, devices)
