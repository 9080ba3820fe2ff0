"""Metrics: a metric is that of the global batch, where it is updated, where its result is asked for, and in the logs."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph

from tfdist.keras_hooks.losses import steps_of
from tfdist.keras_hooks.table import ORIGINAL, TENSORFLOW_TRAINER, is_users, replaces
from tfdist.losses.undivided_batch import of_given_batches
from tfdist.metrics import global_results, updates
from tfdist.sharding import config_of, placement, request_placement


@replaces("keras.metrics.Metric", "__init__")
def _init(original: Callable[..., None], self: Any, dtype: Any = None, name: str | None = None) -> None:
    """A rank updates a metric with its own rows, and in a step its result is that of the rank: wrong for what is no sum over
    rows, and for results that a custom step logs. Every subclass has methods of its own, so `update_state` and `result` are
    replaced in each class: in those that exist when tfdist is first used, and in others when one is made."""
    for kind in type(self).__mro__:
        if issubclass(kind, keras.metrics.Metric) and kind is not keras.metrics.Metric:
            _span_ranks(kind)
    original(self, dtype=dtype, name=name)


def span_ranks(kind: Any = keras.metrics.Metric) -> None:
    """Replaces `update_state` and `result` of the subclasses of `kind`, and of theirs."""
    for subclass in kind.__subclasses__():
        _span_ranks(subclass)
        span_ranks(subclass)


@replaces(
    "keras.metrics.Metric", "add_variable", signature="(self, shape, initializer, dtype=None, aggregation='sum', name=None)"
)
def _add_variable(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Each rank would begin with the initial value of a state that ranks sum, and Keras may put off making it: it must be known
    as a metric's."""
    with placement(is_of_metric=True):
        variable = original(self, *args, **kwargs)
    if variable._value is None:
        request_placement(variable, is_of_metric=True)
    return variable


def _span_ranks(kind: type) -> None:
    """Replaces the methods that `kind` itself has. Those that hold other metrics, of compiled models, only pass updates on."""
    for name, binding in (("update_state", updates.update), ("result", global_results.result)):
        method = kind.__dict__.get(name)
        if (
            inspect.isfunction(method)
            and not hasattr(method, ORIGINAL)
            and not (name == "update_state" and updates.is_container(kind))
        ):
            setattr(kind, name, _replacing(method, binding))


def _replacing(method: Callable[..., Any], binding: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def replacing(self: Any, *args: Any, **kwargs: Any) -> Any:
        # AutoGraph converts what a `tf.function` calls, but leaves tfdist's code alone: what that calls in turn must say so.
        own = autograph.tf_convert(method.__get__(self), ag_ctx.control_status_ctx())
        return binding(own, self, *args, **kwargs)

    setattr(replacing, ORIGINAL, method)
    return replacing


@replaces(TENSORFLOW_TRAINER, "_make_function")
def _make_function(original: Callable[..., Any], self: Any, step_function: Callable[..., Any]) -> Any:
    """A step's logs must say whose they are: where Keras reduces them it does not know the model."""
    if config_of(self._distribute_strategy) is None:
        return original(self, step_function)
    step = steps_of(self, step_function)

    def is_logged_after() -> bool:
        return not any(map(is_users, (step_function, self.compute_metrics, self.get_metrics_result)))

    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        return of_given_batches(step, lambda step: original(self, step))

    return global_results.naming_the_model(self, step, make, is_logged_after)


@replaces("keras.src.backend.tensorflow.trainer", "reduce_per_replica")
def _reduce_per_replica(original: Callable[..., Any], values: Any, strategy: Any, reduction: str) -> Any:
    """After a batch Keras logs the mean of the ranks' metrics: of areas under curves, of ratios of different denominators."""
    if config_of(strategy) is None:
        return original(values, strategy, reduction)
    return global_results.reduce_logs(values, strategy, lambda values: original(values, strategy, reduction))
