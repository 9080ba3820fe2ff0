"""Metrics: what is logged after a batch is computed from the sums over the ranks, not as the mean of the ranks' metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.keras_hooks.losses import steps_of
from tfdist.keras_hooks.table import TENSORFLOW_TRAINER, replaces
from tfdist.losses.trainer_step import counted, weight_of_logs
from tfdist.metrics.global_results import naming_the_model, reduce_logs
from tfdist.sharding import config_of


@replaces(TENSORFLOW_TRAINER, "_make_function")
def _make_function(original: Callable[..., Any], self: Any, step_function: Callable[..., Any]) -> Any:
    """A step's logs must say whose they are: where Keras reduces them it does not know the model."""
    if config_of(self._distribute_strategy) is None:
        return original(self, step_function)
    return naming_the_model(self, steps_of(self, step_function), lambda step: original(self, step), weight_of_logs)


@replaces("keras.metrics.Mean", "update_state")
def _update_mean(original: Callable[..., Any], self: Any, values: Any, sample_weight: Any = None) -> Any:
    """A number that a step of Keras's trainer has computed, such as a loss, is of a rank's rows, and counts what they are of the
    batch; Keras counts each rank's as one."""
    return original(self, *counted(values, sample_weight))


@replaces("keras.src.backend.tensorflow.trainer", "reduce_per_replica")
def _reduce_per_replica(original: Callable[..., Any], values: Any, strategy: Any, reduction: str) -> Any:
    """After a batch Keras logs the mean of the ranks' metrics: of areas under curves, of ratios of different denominators."""
    if config_of(strategy) is None:
        return original(values, strategy, reduction)
    return reduce_logs(values, strategy, lambda values: original(values, strategy, reduction))
