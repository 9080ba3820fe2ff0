"""Running statistics: variables that a layer assigns in a step, each rank from its own examples. They stay equal on all ranks.

A moving mean of `BatchNormalization`, a centre, a running maximum: not trainable, floating, without an `aggregation`. Under
tf.distribute each rank keeps its own, they drift apart, and what is saved is the first one's. Here, at the end of a step, each is
replaced on all ranks by the ranks' mean, weighted by how much each rank has seen:

    v = sum_r w_r v_r / sum_r w_r      w_r: elements that the rank's statistics are of (BatchNormalization), else its rows

All of them travel in one all-reduce. Within a step a read gives the rank's own value. A statistic that is a mean over examples
is then that of the global batch; other ones (a variance, a maximum) are the mean of the ranks'. A rank without rows has weight 0;
where no rank has any, each keeps what it has assigned.

Left alone: what has an `aggregation` (metrics), integers (seeds, step counters), what an optimizer assigns, the states of
recurrent layers, and variables that were made trainable, frozen or not. A counter of examples is a sum, not a mean: give it
`aggregation="sum"` and add with `counter.value.assign_add(...)` (Keras's own `assign_add` would sum the ranks' old values, too).

The mistake to avoid: a nested `tf.function` around the assignment. It is traced once, and a second trace of the step that reuses
it does not see the assignment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import RankProgram, group_ops, rank_program
from tfdist.losses.rank_batch import RankBatch
from tfdist.sharding import keras_scope


class Statistics:
    """The statistics that one rank assigns in one trace; an attachment of its program."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._assigned: dict[int, tf.Variable] = {}
        self._weights: dict[int, tf.Tensor] = {}
        self._agreed: set[int] = set()
        program.at_close.append(self._average)

    def assigned(self, variable: tf.Variable) -> None:
        """Notes that this rank assigns to `variable`, one of `tf.distribute`."""
        self._assigned[id(variable)] = variable

    def weigh(self, variables: Iterable[keras.Variable], weight: tf.Tensor) -> None:
        """Sets how much this rank's values of `variables` weigh, a scalar; without it, the rows of its batch."""
        for variable in variables:
            self._weights[id(variable._value)] = weight

    def agree(self, variables: Iterable[keras.Variable]) -> None:
        """Says that all ranks assign the same to `variables`."""
        self._agreed.update(id(variable._value) for variable in variables)

    def _average(self, outputs: Any) -> None:
        variables = [variable for key, variable in self._assigned.items() if key not in self._agreed]
        if not variables:
            return
        program = self._program
        wide = tf.float64 if any(variable.dtype == tf.float64 for variable in variables) else tf.float32
        with tf.device(program.device):
            rows = program.attachment(RankBatch).rows
            weights = [tf.cast(self._weight(variable, rows), wide) for variable in variables]
            values = [tf.cast(variable.read_value(), wide) for variable in variables]
            # Not a product alone: the statistics of no rows are NaN.
            shares = [tf.where(w > 0, w * value, tf.zeros_like(value)) for w, value in zip(weights, values, strict=True)]
            packed = tf.concat([tf.reshape(share, [-1]) for share in shares] + [tf.stack(weights)], 0)
            total = group_ops.all_reduce(program, packed, program.group_ranks("data"), "sum", "statistics")
            sizes = [value.shape.num_elements() for value in values]
            *sums, total_weights = tf.split(total, [*sizes, len(weights)])
            for index, (variable, value) in enumerate(zip(variables, values, strict=True)):
                weight = total_weights[index]
                mean = tf.where(weight > 0, tf.reshape(sums[index], value.shape) / weight, value)
                variable.assign(tf.cast(mean, variable.dtype))

    def _weight(self, variable: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
        weight = self._weights.get(id(variable), rows)
        # One that a branch or a nested function has computed does not exist here.
        return weight if self._program.exists_here(weight) else rows


def note_assigned(variable: tf.Variable) -> None:
    """Notes that this rank has assigned to `variable`, of any kind: if it is a running statistic, it will be averaged."""
    program = rank_program(peers_on="data")
    if program is None or not _is_statistic(variable):
        return
    if not isinstance(keras_scope.current_layer(), keras.layers.RNN | keras.optimizers.Optimizer):
        program.attachment(Statistics).assigned(variable)


def _is_statistic(variable: tf.Variable) -> bool:
    return (
        isinstance(variable, tf.distribute.DistributedValues)
        and not variable.layout.is_data_sharded
        and variable.dtype.is_floating
        and not variable.trainable
        and variable.aggregation == tf.VariableAggregation.NONE
        and variable.synchronization != tf.VariableSynchronization.ON_READ
    )
