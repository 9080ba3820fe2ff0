"""Variables that a step assigns, each rank from its own examples: they stay equal on all ranks, and are those of one device.

In a traced step what is assigned is computed of the global batch (see `placements.repair`): sums, means, maxima, queues of rows.
Where that cannot be told, in loops, eager steps, and of `BatchNormalization`, whose moving statistics nobody reads in the step,
a floating variable that is not trainable becomes on all ranks, when the step ends, their mean, weighted by what each has seen:

    v = sum_r w_r v_r / sum_r w_r      w_r: elements that the rank's statistics are of (BatchNormalization), else its rows

All of these travel in one all-reduce. Until then a read gives the rank's own value. A rank without rows has weight 0; where no
rank has any, each keeps what it has assigned.

Left alone: what has an `aggregation` (metrics), what an optimizer assigns, and the states of recurrent layers.

The mistake to avoid: a nested `tf.function` around the assignment. It is traced once, and a second trace of the step that reuses
it does not see the assignment.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.collectives import Part, RankProgram, group_ops, rank_program
from tfdist.losses.undivided_batch import is_given_everywhere
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import Placement, Replicate, Unknown
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.repair import Repair
from tfdist.sharding import ReplicatedMirroredVariable, UnshardSchedule, gradient_graph, keras_scope
from tfdist.sharding.gradient_numbers import GradientNumbers
from tfdist.sharding.gradient_stubs import GradientStubs
from tfdist.sharding.gradient_weight import GradientWeight
from tfdist.sharding.packing import side_by_side, split
from tfdist.sharding.tape_gradients import TapeGradients

_told: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id: variables compare by value


class Statistics(Part):
    """The statistics that one rank assigns in one trace. A part of its state."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._assigned: dict[int, tf.Variable] = {}
        self._weights: dict[int, tf.Tensor] = {}
        self._agreed: set[int] = set()

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

    def value_of_batch(self, variable: tf.Variable, path: str, value: Any) -> Any:
        """Returns what this rank assigns to `variable`, which Keras calls `path`, and for which it has computed `value`."""
        key = id(variable)
        if key in self._weights or not tf.is_symbolic_tensor(value) or is_given_everywhere():
            return value
        program = self._program.here()
        if program is None or program.graph is not tf.compat.v1.get_default_graph():
            return value
        if not program.exists_here(value):  # in a branch
            value = program.graph.capture(value)
        program.part(Repair).look()  # what gradients go back to reads sums of them first
        if _is_of_gradients(value, program) and not self._is_of_rows_and_sums(value):
            self._agreed.add(key)  # the sum of the ranks', or this rank's part of it
            return value
        repair, label = program.part(Repair), f"statistics/{path}"
        with repair.without_shares():
            placement = repair.known(value, label)
            if placement == Replicate(is_drawn=True):
                return value
            whole = repair.whole(value, label)
        if whole is None:
            self._agreed.discard(key)
            _warn(variable, path, placement)
            return value
        self._agreed.add(key)
        whole.set_shape(value.shape)
        return whole

    def _is_of_rows_and_sums(self, value: tf.Tensor) -> bool:
        """Whether `value`, computed of gradients in a step of Keras's trainer, where variables get sums of them, is a number of
        the rank's own rows and of such sums."""
        gradients = self._program.part(TapeGradients)
        if not self._program.part(GradientWeight).is_of_trainer:
            return False
        gradients.settle()
        if self._program.part(GradientStubs).needs_sums(value):
            self._program.part(UnshardSchedule).is_of_sums(value)
        return gradients.is_of_sums(value) and not isinstance(self._program.part(Facts).of(value), Replicate)

    def close(self, outputs: Any) -> None:
        variables = [variable for key, variable in self._assigned.items() if key not in self._agreed]
        if not variables:
            return
        program = self._program
        wide = tf.float64 if any(variable.dtype == tf.float64 for variable in variables) else tf.float32
        with tf.device(program.device):
            rows = program.part(RankRows).rows
            weights = [tf.cast(self._weight(variable, rows), wide) for variable in variables]
            values = [tf.cast(variable.read_value(), wide) for variable in variables]
            # Not a product alone: the statistics of no rows are NaN.
            shares = [tf.where(w > 0, w * value, tf.zeros_like(value)) for w, value in zip(weights, values, strict=True)]
            packed = side_by_side([*shares, *weights])
            total = group_ops.all_reduce(program, packed, program.group_ranks("data"), "sum", "statistics")
            sums = split(total, [value.shape for value in values] + [tf.TensorShape([])] * len(weights))
            for index, (variable, value) in enumerate(zip(variables, values, strict=True)):
                weight = sums[len(values) + index]
                mean = tf.cast(tf.where(weight > 0, sums[index] / weight, value), variable.dtype)
                variable.values[program.local_index].assign(mean)

    def _weight(self, variable: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
        weight = self._weights.get(id(variable), rows)
        # One that a branch or a nested function has computed does not exist here.
        return weight if self._program.exists_here(weight) else rows


def value_to_assign(variable: tf.Variable, path: str, value: Any) -> Any:
    """Returns what a rank that has computed `value` for `variable` assigns: of the global batch, where that can be told."""
    program = rank_program(peers_on="data")
    if program is None or program.is_eager or not _is_same_on_all(variable) or _is_of_rank():
        return value
    return program.part(Statistics).value_of_batch(variable, path, value)


def update_of_users(variable: tf.Variable, value: Any, update: Callable[[Any], Any]) -> Any:
    """Lets a rank `update` a variable that is not Keras's by what it has computed: a value, a summand, some rows."""
    path = variable.name.partition(":")[0]
    if isinstance(value, tf.IndexedSlices):
        values, indices = (value_to_assign(variable, path, x) for x in (value.values, value.indices))
        whole = tf.IndexedSlices(values, indices, value.dense_shape)
    else:
        whole = value_to_assign(variable, path, value)
    updated = update(whole)
    note_assigned(variable)
    return updated


ReplicatedMirroredVariable.update_of_users = staticmethod(update_of_users)


def note_assigned(variable: tf.Variable) -> None:
    """Notes that this rank has assigned to `variable`, of any kind: if it is a running statistic, it will be averaged."""
    program = rank_program(peers_on="data")
    if program is not None and _is_statistic(variable) and not _is_of_rank():
        program.part(Statistics).assigned(variable)


def _is_of_rank() -> bool:
    """Whether what is assigned here is a rank's own, or its optimizer's."""
    return isinstance(keras_scope.current_layer(), keras.layers.RNN | keras.optimizers.Optimizer)


def _is_same_on_all(variable: tf.Variable) -> bool:
    return (
        isinstance(variable, tf.distribute.DistributedValues)
        and variable.aggregation == tf.VariableAggregation.NONE
        and variable.synchronization != tf.VariableSynchronization.ON_READ
    )


def _is_statistic(variable: tf.Variable) -> bool:
    return (
        _is_same_on_all(variable)
        and not variable.layout.is_data_sharded
        and variable.layout.data_owner is None
        and variable.dtype.is_floating
        and not variable.trainable
    )


def _is_of_gradients(value: tf.Tensor, program: RankProgram) -> bool:
    """Whether `value` is computed of gradients of parameters."""
    gradients = program.part(TapeGradients)
    of_wholes = gradient_graph.Sources(lambda x: x.graph is program.graph and gradients.is_gradient(x)).of(value)
    is_of_outside = program.outer is not None and program.part(GradientNumbers).is_of_gradients(value)
    return is_of_outside or bool(of_wholes or program.part(GradientStubs).below(value))


def _warn(variable: tf.Variable, path: str, placement: Placement) -> None:
    """Warns, once for `variable`, that what is assigned to it is no value of the global batch."""
    if id(variable) in _told:
        return
    _told[id(variable)] = variable
    why = placement.what if isinstance(placement, Unknown) else type(placement).__name__
    what = "the mean over the devices" if _is_statistic(variable) else "its own value on each device"
    errors.warn(
        f"Variable {path!r} is assigned what a device has computed of its own rows, and what that is of the global "
        f"batch cannot be told ({why}). It becomes {what}.",
        fix="Reduce what depends on rows (`tfdist.collectives.all_reduce`), or gather the rows "
        "(`tfdist.collectives.all_gather(x, uneven=True)`), before it is assigned.",
    )
