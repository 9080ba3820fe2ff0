"""What an optimizer can be asked for, as a table: every row must give under tfdist what it gives on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tfdist
from tests import training

optimizers = keras.optimizers


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and an optimizer; `scales_loss` where a custom loop would have to scale the loss itself."""

    optimizer: Callable[[], keras.optimizers.Optimizer]
    build: Callable[[], keras.Model] = training.small
    scales_loss: bool = False


def constrained() -> keras.Model:
    """Constraints that look at rows and at single elements, which all bind from the start."""
    return keras.Sequential(
        [
            keras.Input((training.FEATURES,)),
            keras.layers.Dense(
                33, activation="tanh", kernel_constraint=keras.constraints.MaxNorm(0.6), bias_constraint="non_neg"
            ),
            keras.layers.Dense(training.CLASSES, kernel_constraint=keras.constraints.UnitNorm(axis=1)),
        ]
    )


def biased() -> keras.Model:
    """`training.small` with a bias."""
    head = keras.layers.Dense(training.CLASSES, name="head")
    return keras.Sequential([keras.Input((training.FEATURES,)), training.ScaleAndShift(name="scale"), head])


def by_name() -> keras.optimizers.Optimizer:
    """Biases by another optimizer, clipped for itself."""
    rules = {".*bias": optimizers.SGD(0.1)}
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.Adam(0.01, global_clipnorm=0.05), rules))


class Signed(optimizers.Optimizer):
    """An optimizer of a user, unknown to tfdist, which looks at a whole tensor: steps by the sign, as long as its mean."""

    def build(self, variables):
        super().build(variables)
        self.sums = self.add_optimizer_variables(variables, "sum")

    def update_step(self, gradient, variable, learning_rate):
        total = self.sums[self._get_variable_index(variable)]
        self.assign_add(total, gradient)
        size = keras.ops.mean(keras.ops.abs(total))
        self.assign_sub(variable, learning_rate * size * keras.ops.tanh(100.0 * total))


@tfdist.optimizers.elementwise
class Halving(optimizers.SGD):
    """An optimizer of a user, declared elementwise."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, 0.5 * learning_rate * gradient)


LIMIT = 0.05  # the gradients' norms are far above

CASES = {
    "clipnorm": Case(lambda: optimizers.SGD(0.5, momentum=0.9, clipnorm=LIMIT)),
    "global_clipnorm": Case(lambda: optimizers.SGD(0.5, momentum=0.9, global_clipnorm=LIMIT)),
    "clipvalue": Case(lambda: optimizers.SGD(0.5, momentum=0.9, clipvalue=LIMIT / 10)),
    "average": Case(lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)),
    "average overwrites": Case(lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2)),
    "constraints": Case(lambda: optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_overwrite_frequency=3), constrained),
    "accumulation": Case(
        lambda: optimizers.SGD(0.5, momentum=0.9, gradient_accumulation_steps=4, global_clipnorm=LIMIT, weight_decay=0.01)
    ),
    "accumulation and averages": Case(
        lambda: optimizers.Nadam(0.01, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2)
    ),
    "loss scale": Case(lambda: optimizers.Adam(0.01, loss_scale_factor=8.0), scales_loss=True),
    "dynamic loss scale": Case(
        lambda: optimizers.LossScaleOptimizer(
            optimizers.SGD(0.5, momentum=0.9, global_clipnorm=LIMIT), initial_scale=2.0**10, dynamic_growth_steps=3
        ),
        scales_loss=True,
    ),
    "dynamic loss scale and accumulation": Case(
        lambda: optimizers.LossScaleOptimizer(
            optimizers.SGD(0.5, momentum=0.9, gradient_accumulation_steps=2), initial_scale=2.0**10, dynamic_growth_steps=3
        ),
        scales_loss=True,
    ),
    "several optimizers": Case(by_name, biased),
    "adafactor": Case(lambda: optimizers.Adafactor(0.01), training.mlp),
    "lamb": Case(lambda: optimizers.Lamb(0.01, weight_decay=0.01, clipnorm=LIMIT), constrained),
    "muon": Case(lambda: optimizers.Muon(0.01, gradient_accumulation_steps=2), training.mlp),
    "unknown": Case(lambda: Signed(0.1, use_ema=True)),
    "declared elementwise": Case(lambda: Halving(0.1)),
    "schedule-free": Case(lambda: optimizers.ScheduleFreeAdamW(0.01)),
}


def built_first(build: Callable[[], keras.Model], optimizer: Callable[[], Any]) -> tuple[Callable, Callable]:
    """Returns the two so that the optimizer is built before the first step is traced.

    ScheduleFreeAdamW copies the weights when it is built; on one device Keras builds it in a trace that never runs.
    """
    made: list[keras.Model] = []

    def model() -> keras.Model:
        made[:] = [build()]
        return made[0]

    def ready() -> keras.optimizers.Optimizer:
        found = optimizer()
        found.build(made[0].trainable_variables)
        return found

    return model, ready


def loop_of(name: str) -> str:
    """Returns the cheaper loop where the row may go through either."""
    return "fit" if CASES[name].scales_loss else "custom_loop"


def train(name: str, loop: str, strategy: Any) -> training.Trained:
    """Trains a row of the table through `fit` or `custom_loop`."""
    case = CASES[name]
    return getattr(training, loop)(strategy, *built_first(case.build, case.optimizer))


def overflowing_data() -> tuple[np.ndarray, np.ndarray]:
    """Data whose third batch overflows in one row, the seventh of twelve: no rank but the second sees it, of 2 as of 4."""
    x, y = training.vectors()
    x[2 * training.BATCH + 6] = 1e30
    y[2 * training.BATCH + 6] = 0
    return x, y


def train_overflowing(strategy: Any, accumulates: bool) -> training.Trained:
    """Trains with a loss scale that only that row's gradient overflows under."""

    def optimizer() -> keras.optimizers.Optimizer:
        steps = {"gradient_accumulation_steps": 2} if accumulates else {}
        return optimizers.LossScaleOptimizer(optimizers.SGD(1e-3, **steps), initial_scale=2.0**40)

    return training.fit(strategy, *built_first(training.small, optimizer), data=overflowing_data())
