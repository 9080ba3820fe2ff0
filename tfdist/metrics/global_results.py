"""What is logged after a batch: metrics computed from the sums over the ranks, not the mean of the ranks' own metrics.

Every rank counts its own examples, and at the end of an epoch Keras adds the counts up before it computes a metric. After a
batch, though, Keras computes the metric on every replica and logs the mean: of N areas under N curves, of ratios with different
denominators. Here a metric that is logged after a batch is computed from the sums, too, as Keras does it at the end of an epoch,
if the step's logs have the names of the model's metrics. Other logs of a custom `train_step` stay means over the ranks.

`train_on_batch` and `test_on_batch` give every rank the whole batch: sums would count the batch N times, and the mean is exact.

Over several workers the sums of all metrics travel in one message for each dtype; in one process they are additions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import values as distribute_values

from tfdist.collectives import cross_replica_of

# Stands beside the batch of `train_on_batch` and `test_on_batch`. A string, by which a `tf.function` tells its traces apart.
_ON_EVERY_RANK = "tfdist: every rank gets this batch"


@dataclasses.dataclass(frozen=True, eq=False)
class _Owner:
    """The model whose logs a step returns; one object for all ranks."""

    model: Any


def naming_the_model(
    model: Any, step: Callable[..., Any], make: Callable[..., Any], weight: Callable[[], tf.Tensor | None]
) -> Callable[..., Any]:
    """Returns the function `make(step)` of an iterator, as Keras makes it, with a step that returns `model` beside its logs.

    It also returns what `weight` does when the step is through: how much a rank's numbers count in their mean (None: 1/N).
    """
    owner = _Owner(model)

    def step_with_owner(data: Any) -> Any:
        if isinstance(data, tuple) and isinstance(data[-1], str) and data[-1] == _ON_EVERY_RANK:
            return step(data[0])
        return step(data), owner, weight()

    function = make(step_with_owner)

    def call(iterator: Any) -> Any:
        if isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
            return function(iterator)
        return function((data, _ON_EVERY_RANK) for data in iterator)

    return call


def reduce_logs(values: Any, strategy: Any, reduce: Callable[[Any], Any]) -> Any:
    """Reduces what a step has returned on the ranks: the metrics of its model from sums, all else by `reduce`."""
    if not cross_replica_of(strategy).is_multi_worker:
        values = tf.nest.map_structure(strategy.extended.one_per_replica, values)
    if not (isinstance(values, tuple) and len(values) == 3 and isinstance(values[1], _Owner)):
        return reduce(values)
    logs, model, weights = values[0], values[1].model, values[2]
    if isinstance(logs, dict):
        with _summed(model.metrics_variables, strategy):
            results = model.get_metrics_result()
        if set(results) == set(logs):
            return {name: results[name] for name in logs}
    return reduce(logs if weights is None else _weighted_means(logs, weights, strategy))


def _weighted_means(logs: Any, weights: Any, strategy: tf.distribute.Strategy) -> Any:
    """Returns `logs` with the floating numbers among them replaced by their means over the ranks, weighted by `weights`.

    A rank whose weight is 0 counts nothing, whatever its number is. All numbers travel in one message.
    """
    flat = tf.nest.flatten(logs)
    of_rank = [strategy.experimental_local_results(value) for value in flat]
    numbers = [
        place
        for place, values in enumerate(of_rank)
        if all(tf.is_tensor(value) and value.shape.rank == 0 and value.dtype.is_floating for value in values)
    ]
    if not numbers:
        return logs
    parts = [
        tf.math.multiply_no_nan(tf.stack([tf.cast(of_rank[place][rank], tf.float64) for place in numbers]), weight)
        for rank, weight in enumerate(strategy.experimental_local_results(weights))
    ]
    cross_replica = cross_replica_of(strategy)
    if cross_replica.is_multi_worker:
        total = cross_replica.all_reduce(parts, "sum", "logs")[0]
    else:
        total = tf.add_n(parts)  # of one rank of each replica already
    means = tf.unstack(total, num=len(numbers))
    for place, mean in zip(numbers, means, strict=True):
        flat[place] = tf.cast(mean, of_rank[place][0].dtype)
    return tf.nest.pack_sequence_as(logs, flat)


def _summed(variables: Sequence[Any], strategy: tf.distribute.Strategy) -> keras.StatelessScope:
    """Returns a scope in which `variables`, where each rank has its own part of a sum, read as the sum over all ranks."""
    by_dtype: dict[tf.DType, list[Any]] = {}
    for variable in variables:
        value = variable.value
        if isinstance(value, tf.distribute.DistributedValues) and value.aggregation == tf.VariableAggregation.SUM:
            by_dtype.setdefault(value.dtype, []).append(variable)
    sums: list[tuple[Any, tf.Tensor]] = []
    for members in by_dtype.values():
        parts = zip(*(member.value.values for member in members), strict=True)
        packed = [tf.concat([tf.reshape(part, [-1]) for part in of_rank], 0) for of_rank in parts]
        pieces = tf.split(_sum_over_ranks(packed, strategy), [member.value.shape.num_elements() for member in members])
        sums.extend((member, tf.reshape(piece, member.shape)) for member, piece in zip(members, pieces, strict=True))
    return keras.StatelessScope(state_mapping=sums)


def _sum_over_ranks(parts: Sequence[tf.Tensor], strategy: tf.distribute.Strategy) -> tf.Tensor:
    cross_replica = cross_replica_of(strategy)
    if cross_replica.is_multi_worker:
        return cross_replica.all_reduce(parts, "sum", "metrics")[0]
    return tf.add_n(strategy.extended.one_per_replica(distribute_values.PerReplica(tuple(parts))).values)
