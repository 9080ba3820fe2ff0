"""How a rank updates a metric: with its own rows where updates add up, else with the rows of all ranks.

    a metric of Keras; one whose updates are seen to be sums    each rank its own rows; what is read is the sum over the ranks
    a number, given to `Mean` or `Sum`                          weighted by the rank's part of the rows: a mean over rows
    any other                                                   every rank the rows of all ranks, as one device would

Which it is is found out when a metric is first updated in `strategy.run`, and holds for its life. What is not known to add up is
exact all the same: a maximum, a metric function that returns one number for the batch, a ratio.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import RankProgram, rank_program
from tfdist.metrics.additive import adds_up
from tfdist.metrics.adoption import adopt
from tfdist.metrics.arguments import Arguments
from tfdist.metrics.gathered import GatheredBatch, why_not
from tfdist.placements import eager
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.repair import Repair
from tfdist.placements.telling import known
from tfdist.sharding import PartialSyncOnReadVariable, keras_scope
from tfdist.sharding.gradient_numbers import GradientNumbers

Update = Callable[..., Any]


class _Way(enum.Enum):
    """With which rows a rank updates a metric."""

    OWN_ROWS = enum.auto()  # nothing is sent
    ALL_ROWS = enum.auto()  # the arguments are gathered, once a step for all metrics
    ALL_ROWS_ON_FIRST = enum.auto()  # and data index 0 alone updates it: other stages' ranks do not, and hold summands


_local = threading.local()
_ways: weakref.WeakKeyDictionary[keras.metrics.Metric, _Way] = weakref.WeakKeyDictionary()


class _Updates:
    """Whether a metric is being updated in a rank's program: what it updates in turn is a part of it."""

    def __init__(self, program: RankProgram):
        del program
        self.is_inside = False


def update(
    metric: keras.metrics.Metric,
    own: Update,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fraction: Callable[[RankProgram], tf.Tensor],
    once: Callable[[RankProgram, Any], Any],
    whole_batch: Callable[[], contextlib.AbstractContextManager[None]],
) -> Any:
    """Updates `metric` by `own(*args, **kwargs)`, its `update_state`, with the rows that it needs.

    Args:
        metric: the metric, made under a tfdist strategy or under none.
        own: the bound `update_state` of its class.
        args: the arguments, those of a rank in `strategy.run`; elsewhere `own` is called with them as they are.
        kwargs: the arguments by name.
        fraction: returns a rank's part of the global batch's rows, a float64 scalar.
        once: returns rows, or a weight, without those that other ranks have, too, and that count there.
        whole_batch: returns a block in which losses are those of a whole batch, not of a rank's part.
    """
    program = rank_program(peers_on="data")
    if program is None or keras_scope.in_stateless_scope():
        return own(*args, **kwargs)
    adopt(metric, tf.distribute.get_strategy())
    if not _spans_ranks(metric):
        return own(*args, **kwargs)
    updates = program.attachment(_Updates)
    if updates.is_inside:
        return own(*args, **kwargs)

    def part() -> tf.Tensor:
        return fraction(program)

    def counted(x: Any) -> Any:
        return once(program, x)

    arguments = Arguments(args, kwargs)
    args, kwargs = arguments.replaced([x if x.shape.rank == 0 else counted(x) for x in arguments.tensors])
    arguments = Arguments(args, kwargs)
    with temporary.attributes(updates, is_inside=True):
        if metric not in _ways:
            _ways[metric] = _way(metric, own, arguments, args, kwargs, program)
        if _ways[metric] is not _Way.OWN_ROWS:
            args, kwargs = program.attachment(GatheredBatch).of(arguments, part)
            if _ways[metric] is _Way.ALL_ROWS:
                _hold_whole(metric)
            elif program.mesh.coordinate(program.rank).data > 0:
                return None
            with whole_batch(), _own_use(program):
                return own(*args, **kwargs)
        _hold_summands(metric)
        if arguments.have_no_rows and metric.variables:
            return None  # it adds nothing, and Keras's operations refuse it where they see it: in eager runs
        if _is_keras(own, "Mean.update_state", "Sum.update_state"):
            args, kwargs = _weighted(metric, own, args, kwargs, part, counted)
        with _own_use(program):
            updated = own(*args, **kwargs)
        _hold_summands(metric)  # also what it has made now
        return updated


def _own_use(program: RankProgram) -> contextlib.AbstractContextManager[None]:
    """A block of a metric's own operations: what they make of numbers of rows is no number that gradients meet."""
    here = program.here()
    return eager.own_use(program) if program.is_eager or here is None else here.attachment(GradientNumbers).own_use()


def of_one_slice() -> contextlib.AbstractContextManager[None]:
    """A block in which Keras's `compute_metrics` updates metrics with a slice of the rows, and returns no results.

    To read a result is a message of all ranks, and nobody asks what it is after a slice.
    """
    return temporary.attributes(_local, has_one_slice=True)


def has_one_slice() -> bool:
    """Whether this is in a block of `of_one_slice`."""
    return getattr(_local, "has_one_slice", False)


def add_up_over_slices(metrics: Sequence[keras.metrics.Metric], predictions: Sequence[tf.Tensor]) -> bool:
    """Whether `metrics`, of a model's `predictions`, may be updated with slices of the rows: all of them are sums over rows."""
    return all(
        _is_known_to_add_up(one, one.update_state, (None, x)) for metric in metrics for one in parts(metric) for x in predictions
    )


def is_of_ranks(variable: keras.Variable) -> bool:
    """Whether each rank has a value of its own: the variable was made in the scope of a tfdist strategy."""
    return isinstance(variable._value, PartialSyncOnReadVariable)


def parts(metric: keras.metrics.Metric) -> list[keras.metrics.Metric]:
    """Returns the metrics that are updated one by one: `metric`, or those in it, of a compiled model."""
    return [one for held in metric.metrics for one in parts(held)] if is_container(type(metric)) else [metric]


def is_container(kind: type) -> bool:
    """Whether metrics of class `kind` only hold others, of compiled models."""
    return kind.__module__ == "keras.src.trainers.compile_utils"


def may_add_up(metric: keras.metrics.Metric) -> bool:
    """Whether ranks may hold summands of the metric's state; that of a metric of Keras they do from now on."""
    if metric not in _ways and _is_known_to_add_up(metric, metric.update_state):
        _ways[metric] = _Way.OWN_ROWS
        _hold_summands(metric)
    return _ways.get(metric) is not _Way.ALL_ROWS


def _spans_ranks(metric: keras.metrics.Metric) -> bool:
    """Whether the metric is the strategy's: else all ranks have the same variables."""
    return all(map(is_of_ranks, metric.variables))


def _hold_summands(metric: keras.metrics.Metric) -> None:
    for variable in metric.variables:
        if is_of_ranks(variable):
            variable._value.hold_summands()


def _hold_whole(metric: keras.metrics.Metric) -> None:
    for variable in metric.variables:
        if is_of_ranks(variable):
            variable._value.hold_whole()


def _way(
    metric: keras.metrics.Metric,
    own: Update,
    arguments: Arguments,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    program: RankProgram,
) -> _Way:
    if _is_known_to_add_up(metric, own, args, kwargs):
        return _Way.OWN_ROWS
    with program.on_trial():
        if all(variable.aggregation == "sum" for variable in metric.variables) and adds_up(own, arguments):
            return _Way.OWN_ROWS
    obstacle = why_not(arguments)
    if program.attachment(RankRows).are_of_slices:
        obstacle = "in a pipeline it is updated with the rows of one microbatch"
    if not program.may_emit_here():
        obstacle = "it is updated in a branch, a loop or a nested `tf.function`"
    if not obstacle:
        return _Way.ALL_ROWS_ON_FIRST if program.mesh.splits_layers else _Way.ALL_ROWS
    warnings.warn(
        f"The metric {metric.name!r} ({type(metric).__name__}) is updated by each device with its own rows, and the devices' "
        f"states are added up: right only if they are sums over rows. Its updates are not seen to be such sums, and {obstacle}. "
        "Assign sums of what is computed for each row, `self.total.assign_add(ops.sum(...))`, or update it after "
        "`strategy.run`, with the whole batch.",
        stacklevel=2,
    )
    return _Way.OWN_ROWS


def _as_mean(value: tf.Tensor, metric: keras.metrics.Metric, part: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Returns `value`, a number, such that the ranks' own, by their weights, are that of the whole batch."""
    program = rank_program()
    here = None if program is None else program.here()
    if here is None or program.attachment(RankRows).are_of_slices:
        return value
    known(program, value, f"metric/{metric.name}", metric, f"The number given to the metric {metric.name!r}")
    if program.is_eager:
        return here.attachment(eager.EagerFacts).as_mean(value)
    if not tf.is_symbolic_tensor(value):
        return value
    return here.attachment(Repair).as_mean(value, f"metric/{metric.name}")


def _is_known_to_add_up(metric: keras.metrics.Metric, own: Update, args: Any = (), kwargs: Any = None) -> bool:
    """Whether the metric is one of Keras's, all of which add up but for what a function makes of a whole batch."""
    if not _is_keras(own) or not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return _is_keras(own)
    predictions = args[1] if len(args) > 1 else (kwargs or {}).get("y_pred")
    rank = getattr(getattr(predictions, "shape", None), "rank", None)
    # Of predictions that are one vector Keras's functions return one number.
    return inspect.isfunction(metric._fn) and _is_keras(metric._fn) and rank is not None and rank > 1


def _is_keras(function: Any, *names: str) -> bool:
    """Whether `function` is one of Keras's, with one of `names`, if given."""
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", "")
    return module.startswith("keras.") and (not names or name in names)


def _weighted(
    metric: keras.metrics.Metric,
    own: Update,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    part: Callable[[], tf.Tensor],
    counted: Callable[[tf.Tensor], tf.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of `Mean` or `Sum` with a number weighted by the rank's `part` of the rows.

    A weight that is a tensor is taken for a count of the rank's rows, as Keras gives it.
    """
    given = inspect.signature(own).bind(*args, **kwargs).arguments
    values, given_weight = given["values"], given.get("sample_weight")
    if isinstance(values, tf.RaggedTensor | tf.SparseTensor):
        return args, kwargs
    value = keras.ops.convert_to_tensor(values)
    if value.shape.rank != 0:
        return args, kwargs
    if given_weight is None or isinstance(given_weight, int | float):
        weight = tf.cast(part(), metric.dtype) * (1 if given_weight is None else given_weight)
    else:
        weight = counted(tf.convert_to_tensor(given_weight))
        if weight.shape.rank != 0:
            return args, kwargs
        weight = tf.cast(weight, metric.dtype)
    value = tf.cast(_as_mean(value, metric, part), metric.dtype)
    value = tf.where(weight > 0, value, tf.zeros_like(value))  # of no rows it may be no number
    if given_weight is None and not _is_keras(own, "Mean.update_state"):
        return (value * weight,), {}
    return (value, weight), {}
