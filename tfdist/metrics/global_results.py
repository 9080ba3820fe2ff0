"""A metric's result is that of the global batch: computed from the sums over the ranks, wherever it is asked for.

Every rank counts its own examples, and outside replicas Keras reads the sum of the counts. In the function that `strategy.run`
runs, though, a rank would compute the metric of its own examples, and Keras would log the mean over the ranks: of N areas under
N curves, of ratios with different denominators.

    in a `train_step` or a custom training loop `metric.result()` sums the metric's state over the ranks: one message for each
                                                dtype of a metric, where it is called
    in a step that is Keras's own               nothing is sent where Keras asks for results; those that are logged are computed
                                                after the step, from the sums of all metrics at once: over several workers one
                                                message for each dtype, in one process additions
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram, cross_replica_of, rank_program
from tfdist.losses.trainer_step import trainer_step
from tfdist.metrics import updates
from tfdist.metrics.outside_scope import move_metric
from tfdist.placements import eager
from tfdist.placements.totals import Totals
from tfdist.sharding import keras_scope
from tfdist.sharding.packing import side_by_side, split


@dataclasses.dataclass(frozen=True, eq=False)
class _Owner:
    """The model whose metrics are logged after a step (None: of no model); one object for all ranks."""

    model: Any


def _summed() -> weakref.WeakKeyDictionary[keras.metrics.Metric, bool]:
    """Of which metrics the ranks of one trace sum results: those that may be sums when the first rank asks."""
    return weakref.WeakKeyDictionary()


def result(own: Callable[..., Any], metric: keras.metrics.Metric, /, *args: Any, **kwargs: Any) -> Any:
    """Returns `own(*args, **kwargs)`, the `result` of the metric's class; in a rank computed from the sums over the ranks."""
    program = rank_program(peers_on="data")
    if program is None or keras_scope.in_stateless_scope():
        return own(*args, **kwargs)
    move_metric(metric, tf.distribute.get_strategy())
    with eager.own_use(program):
        return tf.nest.map_structure(_as_tensor, _result(metric, functools.partial(own, *args, **kwargs), program))


def _as_tensor(value: Any) -> Any:
    """Returns what a Keras variable holds now: of one that is a result itself, ranks would log what it holds in the end."""
    return tf.convert_to_tensor(value) if isinstance(value, keras.Variable) else value


def _result(metric: keras.metrics.Metric, own: Callable[[], Any], program: RankProgram) -> Any:
    if program.part(updates.RankMetrics).has_own_results:
        return own()
    variables = [variable for variable in metric.variables if updates.is_of_ranks(variable) and variable.aggregation == "sum"]
    may_add_up = any(updates.may_add_up(one, program) for one in updates.parts(metric))
    if not variables or not program.plan.shared(_summed).setdefault(metric, may_add_up):
        return own()
    if not program.may_emit_here():
        errors.warn(
            f"`result()` of the metric {metric.name!r} is called in a branch, a loop or a nested `tf.function` of the function "
            "given to `strategy.run`: there it is that of the device's own rows. Call it outside of it."
        )
        return own()
    is_first = program.mesh.coordinate(program.rank).data == 0
    # Of a metric that turns out to be whole, or is not updated at all, every rank has the same.
    values = [variable._value for variable in variables]
    parts = [x.read_value() if is_first or x.is_sum else tf.zeros(x.shape, x.dtype) for x in values]
    sums = program.part(Totals).reduced(parts, "sum", "metrics")
    read_as = [(variable, tf.cast(total, x.dtype)) for variable, total, x in zip(variables, sums, values, strict=True)]
    with keras.StatelessScope(state_mapping=read_as):
        return own()


def naming_the_model(
    model: Any, step: Callable[..., Any], make: Callable[..., Any], is_logged_after: Callable[[], bool]
) -> Callable[..., Any]:
    """Returns the function `make(step)` of an iterator, as Keras makes it, with a step of `model` that says whose its logs are.

    Where `is_logged_after()`, all that the step does with results is Keras's own code: they are those of the rank then, and
    `reduce_logs` computes them anew.
    """
    owner, no_owner = _Owner(model), _Owner(None)

    def step_with_owner(data: Any) -> Any:
        program = rank_program(peers_on="data")
        has_owner = is_logged_after()
        if program is not None:
            program.part(updates.RankMetrics).has_own_results = has_owner
        logs, rows = step(data), trainer_step()
        return logs, owner if has_owner else no_owner, None if rows is None else rows.weight()

    return make(step_with_owner)


def reduce_logs(values: Any, strategy: Any, reduce: Callable[[Any], Any]) -> Any:
    """Reduces what a step has returned on the ranks: the metrics of its model from sums, all else by `reduce`."""
    if not cross_replica_of(strategy).is_multi_worker:
        values = tf.nest.map_structure(strategy.extended.one_per_replica, values)
    if not (isinstance(values, tuple) and len(values) == 3 and isinstance(values[1], _Owner)):
        return reduce(values)
    logs, model, weights = values[0], values[1].model, values[2]
    if model is not None and isinstance(logs, dict):
        with _summed_outside(model.metrics_variables, strategy):
            results = model.get_metrics_result()
        if set(results) == set(logs):
            return {name: results[name] for name in logs}
    return reduce(logs if weights is None else _weighted_means(logs, weights, strategy))


def _weighted_means(logs: Any, weights: Any, strategy: tf.distribute.Strategy) -> Any:
    """Returns `logs` with the floating numbers among them replaced by their means over the ranks, weighted by `weights`.

    A rank whose weight is 0 counts nothing, whatever its number is. All numbers travel in one message.
    """
    flat = [_as_tensor(value) for value in tf.nest.flatten(logs)]
    of_rank = [[_as_tensor(part) for part in strategy.experimental_local_results(value)] for value in flat]
    num_ranks = len(strategy.experimental_local_results(weights))
    numbers = [
        place
        for place, values in enumerate(of_rank)
        if len(values) == num_ranks
        and all(tf.is_tensor(value) and value.shape.rank == 0 and value.dtype.is_floating for value in values)
    ]
    if not numbers:
        return tf.nest.pack_sequence_as(logs, flat)
    parts = [
        tf.math.multiply_no_nan(tf.stack([tf.cast(of_rank[place][rank], tf.float64) for place in numbers]), weight)
        for rank, weight in enumerate(strategy.experimental_local_results(weights))
    ]
    means = tf.unstack(_sum_over_ranks(parts, strategy, "logs"), num=len(numbers))
    for place, mean in zip(numbers, means, strict=True):
        flat[place] = tf.cast(mean, of_rank[place][0].dtype)
    return tf.nest.pack_sequence_as(logs, flat)


def _summed_outside(variables: Sequence[Any], strategy: tf.distribute.Strategy) -> keras.StatelessScope:
    """Returns a scope in which `variables`, where each rank has its own part of a sum, read as the sum over all ranks."""
    by_dtype: dict[tf.DType, list[Any]] = {}
    for variable in variables:
        if updates.is_of_ranks(variable) and variable._value.is_sum:
            by_dtype.setdefault(variable._value.dtype, []).append(variable)
    is_multi_worker = cross_replica_of(strategy).is_multi_worker
    sums: list[tuple[Any, tf.Tensor]] = []
    for members in by_dtype.values():
        values = [x._value if is_multi_worker else strategy.extended.one_per_replica(x._value) for x in members]
        packed = [
            side_by_side(list(map(tf.convert_to_tensor, of_rank))) for of_rank in zip(*(x.values for x in values), strict=True)
        ]
        total = _sum_over_ranks(packed, strategy, "metrics")
        sums.extend(zip(members, split(total, [x._value.shape for x in members]), strict=True))
    return keras.StatelessScope(state_mapping=sums)


def _sum_over_ranks(parts: Sequence[tf.Tensor], strategy: tf.distribute.Strategy, label: str) -> tf.Tensor:
    """Returns the sum of `parts`: over several workers of each local rank, in one process of one rank of each replica."""
    cross_replica = cross_replica_of(strategy)
    return cross_replica.all_reduce(parts, "sum", label)[0] if cross_replica.is_multi_worker else tf.add_n(parts)
