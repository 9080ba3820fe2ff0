"""Training the same tiny model under a strategy and on one device, for the parity tests."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.devices import names
from tests.parity.comparison import losses_of_fit

SAMPLES, FEATURES, CLASSES = 72, 15, 7
BATCH = 12  # divisible by 2, 3 and 4 ranks: 6 steps an epoch


@dataclasses.dataclass
class Trained:
    """What a run leaves behind, as numpy."""

    losses: list[float]
    weights: dict[str, np.ndarray]
    slots: dict[str, np.ndarray]
    model: Any = None
    strategy: Any = None


class ScaleAndShift(keras.layers.Layer):
    """A layer with a scalar weight and one with fewer elements than ranks."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones")
        self.shift = self.add_weight(name="shift", shape=(1, 3), initializer="zeros")

    def call(self, x):
        return keras.ops.concatenate([x[:, :3] + self.shift, x[:, 3:]], axis=-1) * self.scale


class JoinedWeights(keras.layers.Layer):
    """Takes its weights out of one tensor in which it has joined them, as Keras does for cuDNN's LSTM."""

    def build(self, shape):
        self.width, self.supports_masking = shape[-1], True
        self.kernel = self.add_weight(name="kernel", shape=(self.width, 2 * self.width))
        self.bias = self.add_weight(name="bias", shape=(self.width,), initializer="ones")

    def call(self, x):
        parts = [tf.transpose(part) for part in tf.split(self.kernel, 2, axis=1)]
        joined = tf.concat([tf.reshape(part, [-1]) for part in [*parts, tf.zeros_like(self.bias), self.bias]], 0)
        size = self.width**2
        first, second = (tf.reshape(joined[start : start + size], [self.width] * 2) for start in (0, size))
        return tf.tanh(x @ tf.transpose(first)) @ tf.transpose(second) + joined[-self.width :]


def mlp() -> keras.Model:
    """Odd sizes everywhere: 15x33, 33, (), 1x3, 33x7, 7."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(33, activation="tanh", name="hidden"),
            ScaleAndShift(name="scale"),
            keras.layers.Dense(CLASSES, name="head"),
        ]
    )


def small() -> keras.Model:
    """The least model with an odd size, a scalar, fewer elements than ranks, and two layers: (), 1x3, 15x7."""
    head = keras.layers.Dense(CLASSES, use_bias=False, name="head")
    return keras.Sequential([keras.Input((FEATURES,)), ScaleAndShift(name="scale"), head])


def vectors(samples: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    return rng.normal(size=(samples, FEATURES)).astype("float32"), rng.integers(0, CLASSES, size=samples)


def loss_function() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def strategy_for(devices: int, zero_stage: int, **settings: Any) -> tfdist.ShardedStrategy:
    return tfdist.ShardedStrategy(names(devices), zero_stage=zero_stage, **settings)


def on_two_data_ranks(cpus: list[str], settings: dict[str, Any]) -> tfdist.ShardedStrategy:
    """Returns a strategy with `settings`, of as many of these devices as two data ranks have."""
    return tfdist.ShardedStrategy(
        cpus[: 2 * math.prod(size for name, size in settings.items() if name.endswith("size"))], **settings
    )


def one_device() -> tf.distribute.Strategy:
    return tf.distribute.get_strategy()


def fit(
    strategy: tf.distribute.Strategy,
    build: Callable[[], keras.Model],
    optimizer: Callable[[], keras.optimizers.Optimizer],
    data: tuple[np.ndarray, np.ndarray] | None = None,
    epochs: int = 1,
    **compile_arguments: Any,
) -> Trained:
    """Trains with `compile` and `fit`, one loss a step."""
    x, y = data if data is not None else vectors()
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build()
        model.compile(optimizer=optimizer(), loss=loss_function(), **compile_arguments)
    if strategy is one_device() and model.built and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)  # or the step, which would make slots, would be traced twice
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
    losses, _ = losses_of_fit(model, dataset, epochs=epochs)
    return collect(model, model.optimizer, losses, strategy)


def custom_loop(
    strategy: tf.distribute.Strategy,
    build: Callable[[], keras.Model],
    optimizer: Callable[[], keras.optimizers.Optimizer],
    data: tuple[np.ndarray, np.ndarray] | None = None,
    steps: int = 6,
    builds_in_step: bool = False,
) -> Trained:
    """Trains with `strategy.run`, `tf.GradientTape` and `optimizer.apply`.

    With `builds_in_step` the optimizer is built in the first step, which makes TensorFlow trace it twice.
    """
    x, y = data if data is not None else vectors()
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = build()
        trainer = optimizer()
        if not (builds_in_step or trainer.built):
            trainer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def step_on_rank(features, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(features, training=True)) / BATCH
        trainer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def step(features, labels):
        return strategy.reduce("SUM", strategy.run(step_on_rank, args=(features, labels)), axis=None)

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True).repeat().take(steps)
    losses = [float(step(*batch)) for batch in strategy.experimental_distribute_dataset(dataset)]
    return collect(model, trainer, losses, strategy)


def gradient_penalty(strategy: tf.distribute.Strategy, model: keras.Model, optimizer: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a rank's step that trains on a gradient, through which it differentiates."""

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(model(x), axis=-1)
            slope = inner.gradient(y, x)
            loss = tf.reduce_mean(tf.reduce_sum(slope**2, -1)) / strategy.num_replicas_in_sync
        optimizer.apply(outer.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step


def collect(model: keras.Model, optimizer: Any, losses: list[float], strategy: Any) -> Trained:
    return Trained(
        losses=[float(loss) for loss in losses],
        weights={f"{i} {v.path}": v.numpy() for i, v in enumerate(model.variables)},
        slots={f"{i} {v.name}": v.numpy() for i, v in enumerate(optimizer.variables)},
        model=model,
        strategy=strategy,
    )


def assert_same(actual: Trained, expected: Trained, rtol: float = 1e-5) -> None:
    """Losses, every weight and every optimizer slot agree to `rtol` of the largest element of each."""
    assert len(expected.losses) >= 6, "too few steps to tell anything"
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=rtol)
    assert max(expected.losses) > min(expected.losses), "nothing was learnt: the comparison would be empty"
    for kind in ("weights", "slots"):
        ours, theirs = getattr(actual, kind), getattr(expected, kind)
        assert len(ours) == len(theirs) > 0
        for (name, mine), reference in zip(ours.items(), theirs.values(), strict=True):
            assert mine.shape == reference.shape, name
            scale = max(np.abs(reference).max(initial=0.0), 1e-2)  # below it is the rounding of gradients that are zero
            np.testing.assert_allclose(mine, reference, rtol=0, atol=rtol * scale, err_msg=f"{kind} {name}")
