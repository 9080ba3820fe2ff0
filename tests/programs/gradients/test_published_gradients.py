"""Training steps as papers describe them, in a `train_step` of one's own: two passes, gradients of gradients, gradients that are
changed, counted and kept, weights that are written by hand.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from grids import exhaustive
from keras import layers, ops
from training import strategy_for

from tests.parity.comparison import BatchLogs, state
from tests.programs.comparing import assert_as_on_one_device, run

pytestmark = pytest.mark.as_traced

ROWS, BATCH = 22, 8  # the last batch has 6 rows


class Trained(keras.Model):
    """A net with two heads and whatever else a step needs; `step(model, x, y)` is its `train_step`."""

    step = None

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(6, "tanh")])
        self.head = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        self.other = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        self.kept = [self.extra(variable.shape) for variable in self.trainable_variables]
        self.scales = self.add_weight(shape=(2,), initializer="ones", name="scales")
        self.number = self.extra((), "ones")

    def extra(self, shape, initializer="zeros"):
        return self.add_weight(shape=shape, initializer=initializer, trainable=False)

    def call(self, x):
        return self.head(self.body(x))

    @property
    def nets(self):
        return [v for net in (self.body, self.head, self.other) for v in net.trainable_variables]

    def losses_of(self, x, y):
        """The losses of two tasks."""
        hidden = self.body(x)
        first = keras.losses.sparse_categorical_crossentropy(y, self.head(hidden), from_logits=True)
        return tf.reduce_mean(first), tf.reduce_mean((self.other(hidden) - x[:, :3]) ** 2)

    def train_step(self, data):
        return type(self).step(self, *data)


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


def recomputed(model, x, y):
    """TensorFlow's own recomputation, whose gradient function has a tape of its own."""
    again = tf.recompute_grad(lambda hidden: model.head(hidden))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, again(model.body(x)), from_logits=True))
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


def uncertainty_weighted(model, x, y):
    """Kendall et al. 2018."""
    with tf.GradientTape() as tape:
        losses = model.losses_of(x, y)
        total = tf.add_n([tf.exp(-model.scales[i]) * loss + model.scales[i] for i, loss in enumerate(losses)])
    weights = [*model.nets, model.scales]
    model.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
    return {"loss": total, "scale": model.scales[0]}


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


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adam():
    return keras.optimizers.Adam(0.01, epsilon=1e-3)


def accumulating():
    return keras.optimizers.Adam(0.01, epsilon=1e-3, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2)


def layerwise():
    return LayerwiseRates(0.1, momentum=0.9)


STEPS = {
    **{
        step.__name__: (step, optimizer)
        for step, optimizer in [
            (sharpness_aware, sgd), (balanced_gradients, adam), (custom_gradients, sgd), (unconnected_zeros, adam),
            (conflicts_projected, sgd), (uncertainty_weighted, adam), (rates_by_layer, sgd), (adaptively_clipped, sgd),
            (adversarial, adam), (adversarial_by_size, sgd), (penalized_by_inputs, adam), (consolidated, sgd),
            (momentum_by_hand, sgd), (teacher_of_averages, adam), (scaled_by_hand, sgd), (constrained, sgd),
            (proximal_policy, adam), (imagined, adam), (seeds_of_gradients, sgd),
        ]
    },
    "recomputed": (recomputed, sgd),
    "accumulation_and_averages": (plain, accumulating),
    "layerwise_rates": (plain, layerwise),
}  # fmt: skip


def program_of(name):
    step, optimizer = STEPS[name]

    def program(strategy):
        rng = np.random.default_rng(4)
        with strategy.scope():
            model = type("Trained", (Trained,), {"step": staticmethod(step)})()
            model.compile(optimizer())
        logs = BatchLogs()
        x, y = rng.normal(size=(ROWS, 5)).astype("float32"), rng.integers(0, 3, ROWS)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[logs]).history
        return {"history": history, "logs": logs.train, **state(model)}

    program.__name__ = name
    return program


PROGRAMS = {name: program_of(name) for name in STEPS}


@pytest.mark.parametrize(
    ("name", "zero_stage", "devices"), [exhaustive(name, stage, devices) for name in STEPS for stage, devices in ((0, 2), (3, 3))]
)
def test_it_is_one_device(name, zero_stage, devices):
    if name == "recomputed" and zero_stage == 3:
        with pytest.raises(NotImplementedError, match="tfdist.layers.recompute"):
            run(PROGRAMS[name], strategy_for(devices, zero_stage))
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert_as_on_one_device(PROGRAMS[name], zero_stage, devices)
    assert [str(one.message) for one in found if "device" in str(one.message)] == []
