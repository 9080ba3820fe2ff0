"""How a rank updates a metric: with its own rows where updates add up, else with the rows of all ranks.

    a metric of Keras; one whose updates are seen to be sums    each rank its own rows; what is read is the sum over the ranks
    a number, given to `Mean` or `Sum`                          weighted by the rank's part of the rows: a mean over rows
    any other                                                   every rank the rows of all ranks, as one device would

Which it is is found out when a metric is first updated in `strategy.run`, and holds for its life. What is not known to add up is
exact all the same: a maximum, a metric function that returns one number for the batch, a ratio.
"""

import contextlib
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors, temporary
from tfdist.collectives import Part, RankProgram, rank_program
from tfdist.losses.global_losses import whole_batch
from tfdist.losses.undivided_batch import GivenBatch
from tfdist.metrics.additive import adds_up
from tfdist.metrics.arguments import GatheredBatch, dense, mapped, others, why_not
from tfdist.metrics.outside_scope import move_metric
from tfdist.placements import eager
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.telling import as_mean
from tfdist.sharding import PartialSyncOnReadVariable, keras_scope
from tfdist.sharding.gradient_numbers import GradientNumbers

Update = Callable[..., Any]


# Whether a rank updates a metric with its own rows, and sends nothing; else its arguments are gathered.
_has_own_rows: weakref.WeakKeyDictionary[keras.metrics.Metric, bool] = weakref.WeakKeyDictionary()


class RankMetrics(Part):
    """The updates of metrics of one rank. A part of its state.

    Attributes:
        is_updating: whether it updates one: metrics that this one updates are parts of it.
        has_own_results: whether results are those of the rank.
    """

    def __init__(self, program: RankProgram):
        del program
        self.is_updating = self.has_own_results = False


def update(own: Update, metric: keras.metrics.Metric, /, *args: Any, **kwargs: Any) -> Any:
    """Updates `metric` by `own(*args, **kwargs)`, the bound `update_state` of its class, with the rows that it needs.

    The metric may be made under a tfdist strategy or under none; outside `strategy.run` the arguments stay as they are.
    """
    program = rank_program(peers_on="data")
    if program is None or keras_scope.in_stateless_scope():
        return own(*args, **kwargs)
    move_metric(metric, tf.distribute.get_strategy())
    here = program.part(RankMetrics)
    # Of a metric that is no strategy's all ranks have the same variables.
    if here.is_updating or not all(map(is_of_ranks, metric.variables)):
        return own(*args, **kwargs)
    once = program.part(GivenBatch).once
    given = mapped(lambda x: x if x.shape.rank == 0 else once(x), (args, kwargs))
    args, kwargs = given = tf.nest.map_structure(lambda x: once(x) if others(x) else x, given)
    with temporary.attributes(here, is_updating=True):
        if metric not in _has_own_rows:
            _has_own_rows[metric] = _takes_own_rows(metric, own, args, kwargs, program)
        if not _has_own_rows[metric]:
            args, kwargs = program.part(GatheredBatch).of(given)
            if not program.mesh.splits_layers:
                _hold(metric, PartialSyncOnReadVariable.hold_whole)
            elif program.mesh.coordinate(program.rank).data > 0:
                return None  # one rank alone: those of other stages do not update it, and all hold summands
            with whole_batch(), _own_use(program):
                return own(*args, **kwargs)
        _hold(metric)
        is_empty = {x.shape[0] if x.shape.rank else None for x in dense(given)} == {0} and not others(given)
        if is_empty and metric.variables:
            return None  # it adds nothing, and Keras's operations refuse it where they see it: in eager runs
        if _is_keras(own, "Mean.update_state", "Sum.update_state"):
            args, kwargs = _weighted(metric, own, args, kwargs, program)
        with _own_use(program):
            updated = own(*args, **kwargs)
        _hold(metric)  # also what it has made now
        return updated


def _own_use(program: RankProgram) -> contextlib.AbstractContextManager[None]:
    """A block of a metric's own operations: what they make of numbers of rows is no number that gradients meet."""
    here = program.here()
    return eager.own_use(program) if program.is_eager or here is None else here.part(GradientNumbers).own_use()


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


def may_add_up(metric: keras.metrics.Metric, program: RankProgram) -> bool:
    """Whether ranks may hold summands of the metric's state; that of a metric of Keras they do from now on."""
    if metric not in _has_own_rows and _is_known_to_add_up(metric, metric.update_state):
        _has_own_rows[metric] = True
        _hold(metric)
    return _has_own_rows.get(metric, True) or program.mesh.splits_layers


def _hold(metric: keras.metrics.Metric, hold: Callable[[Any], None] = PartialSyncOnReadVariable.hold_summands) -> None:
    for variable in filter(is_of_ranks, metric.variables):
        hold(variable._value)


def _takes_own_rows(
    metric: keras.metrics.Metric, own: Update, args: tuple[Any, ...], kwargs: dict[str, Any], program: RankProgram
) -> bool:
    if _is_known_to_add_up(metric, own, args, kwargs):
        return True
    with program.on_trial():
        if all(variable.aggregation == "sum" for variable in metric.variables) and adds_up(own, (args, kwargs)):
            return True
    obstacle = why_not((args, kwargs))
    if program.part(RankRows).are_of_slices:
        obstacle = "in a pipeline it is updated with the rows of one microbatch"
    if not program.may_emit_here():
        obstacle = "it is updated in a branch, a loop or a nested `tf.function`"
    if not obstacle:
        return False
    errors.warn(
        f"The metric {metric.name!r} ({type(metric).__name__}) is updated by each device with its own rows, and the devices' "
        f"states are added up: right only if they are sums over rows. Its updates are not seen to be such sums, and {obstacle}. "
        "Assign sums of what is computed for each row, `self.total.assign_add(ops.sum(...))`, or update it after "
        "`strategy.run`, with the whole batch."
    )
    return True


def _part_of_rows(program: RankProgram) -> tf.Tensor:
    """Returns the rank's part of the rows; in a branch, before they were counted, that of equal parts."""
    rows, given = program.part(RankRows), program.part(GivenBatch)
    is_known = rows.is_counted or program.may_emit_here()
    part = rows.weight() if is_known else tf.constant(1 / program.mesh.size("data"), tf.float64)
    return given.once(part * tf.cast(given.copies, part.dtype)) if rows.are_everywhere else part


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
    metric: keras.metrics.Metric, own: Update, args: tuple[Any, ...], kwargs: dict[str, Any], program: RankProgram
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of `Mean` or `Sum` with a number weighted by the rank's part of the rows.

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
        weight = tf.cast(_part_of_rows(program), metric.dtype) * (1 if given_weight is None else given_weight)
    else:
        weight = program.part(GivenBatch).once(tf.convert_to_tensor(given_weight))
        if weight.shape.rank != 0:
            return args, kwargs
        weight = tf.cast(weight, metric.dtype)
    told = f"The number given to the metric {metric.name!r}"
    value = tf.cast(as_mean(program, value, f"metric/{metric.name}", metric, told), metric.dtype)
    with _own_use(program):
        value = tf.where(weight > 0, value, tf.zeros_like(value))  # of no rows it may be no number
        if given_weight is None and not _is_keras(own, "Mean.update_state"):
            return (value * weight,), {}
        return (value, weight), {}
