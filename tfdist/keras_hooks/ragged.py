"""Ragged tensors of a batch: which rows theirs are their operations do not tell, since each rank counts its own values."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives import rank_program
from tfdist.keras_hooks.table import replaces
from tfdist.placements.facts import Facts, have_met
from tfdist.placements.kinds import How, Partial, Placement, Places, Shard, Unknown, Why
from tfdist.placements.repair import Repair

_PARTITION = "tensorflow.python.ops.ragged.row_partition.RowPartition"
_OF_ROWS = "What is computed of where rows begin is of rows: the length of each, their number, of which row each value is."


@replaces(_PARTITION, "row_lengths", why=_OF_ROWS)
def _row_lengths(original: Callable[..., Any], self: Any) -> Any:
    return _declared(self, original(self), lambda name: Shard(0, (name,)))


@replaces(_PARTITION, "nrows", why=_OF_ROWS)
def _number_of_rows(original: Callable[..., Any], self: Any) -> Any:
    return _declared(self, original(self), lambda name: Partial(How.COUNT, (name,)))


@replaces(_PARTITION, "value_rowids", why=_OF_ROWS)
def _rows_of_values(original: Callable[..., Any], self: Any) -> Any:
    return _declared(self, original(self), lambda name: Places(False, (name,)))


@replaces("tensorflow.python.ops.ragged.ragged_math_ops", "ragged_reduce_aggregate", why=_OF_ROWS)
def _reduced(
    original: Callable[..., Any],
    reduce_op: Any,
    unsorted_segment_op: Any,
    rt_input: Any,
    axis: Any,
    keepdims: Any,
    separator: Any = None,
    name: Any = None,
) -> Any:
    found = original(reduce_op, unsorted_segment_op, rt_input, axis, keepdims, separator, name)
    is_each_row = isinstance(rt_input, tf.RaggedTensor) and axis in (1, 1 - rt_input.shape.rank) and not have_met(rt_input.values)
    return _declared(rt_input._row_partition, found, lambda name: Shard(0, (name,))) if is_each_row else found


def _declared(partition: Any, found: Any, placement_of: Callable[[str], Placement]) -> Any:
    """Returns `found`, computed of a `partition` of rows of the batch, whose placement is that of the name of their lengths."""
    program, splits = rank_program(peers_on="data"), partition._row_splits
    if program is None or program.is_eager or not tf.is_symbolic_tensor(found):
        return found
    facts: Facts = program.attachment(Facts)
    if splits is not None and program.exists_here(splits) and program.exists_here(found):
        given = facts.of(splits)
        if isinstance(given, Unknown) and given.why is Why.GIVEN:
            facts.declare(found, placement_of(partition.row_splits()[1:].name))  # of which each rank has as many as rows
    return found


@replaces("tensorflow.RaggedTensor", "to_tensor")
def _to_tensor(original: Callable[..., Any], self: Any, default_value: Any = None, name: Any = None, shape: Any = None) -> Any:
    """All that reads it reads rows that are as long as the longest of all ranks."""
    found, program = original(self, default_value, name, shape), rank_program(peers_on="data")
    if program is None or program.is_eager or not (tf.is_symbolic_tensor(found) and program.exists_here(found)):
        return found
    repair: Repair = program.attachment(Repair)
    repair.look()
    return repair.now(found)
