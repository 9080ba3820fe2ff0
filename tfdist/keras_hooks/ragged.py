"""Ragged and sparse tensors: which rows of the batch theirs are no operation tells, since each rank counts its own values."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives import rank_program
from tfdist.keras_hooks.table import replaces
from tfdist.placements.facts import Facts, have_met
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Unknown, Why
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


@replaces("tensorflow.nn", "safe_embedding_lookup_sparse", why="A row for each row of ids, of which each rank has its own.")
def _looked_up(
    original: Callable[..., Any],
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: Any = "mean",
    default_id: Any = None,
    max_norm: Any = None,
    name: Any = None,
    allow_fast_lookup: Any = False,
) -> Any:
    found = original(embedding_weights, sparse_ids, sparse_weights, combiner, default_id, max_norm, name, allow_fast_lookup)
    weights = [] if sparse_weights is None else [sparse_weights.values]
    return _rows_like(found, [sparse_ids.dense_shape, sparse_ids.values, *weights], embedding_weights)


_SAMPLED = "(weights, biases, labels, inputs, num_sampled, num_classes, num_true=1, sampled_values=None, "
_EACH = "A value for each row: the labels and the classes that are drawn are looked up together, and parted again."


@replaces(
    "tensorflow.nn",
    "sampled_softmax_loss",
    signature=f"{_SAMPLED}remove_accidental_hits=True, seed=None, \
name='sampled_softmax_loss')",
    why=_EACH,
)
@replaces("tensorflow.nn", "nce_loss", signature=f"{_SAMPLED}remove_accidental_hits=False, name='nce_loss')", why=_EACH)
def _sampled(
    original: Callable[..., Any],
    weights: Any,
    biases: Any,
    labels: Any,
    inputs: Any,
    num_sampled: Any,
    num_classes: Any,
    num_true: Any = 1,
    sampled_values: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    found = original(weights, biases, labels, inputs, num_sampled, num_classes, num_true, sampled_values, *args, **kwargs)
    drawn, of_labels, of_drawn = sampled_values or (None, labels, None)
    return _rows_like(found, [labels, inputs, of_labels], (weights, biases, drawn, of_drawn))


def _rows_like(found: Any, given: list[Any], beside: Any) -> Any:
    """Returns `found`, a row for each that a rank has in all of `given`, made of what is the same on all ranks `beside` these."""
    program = rank_program(peers_on="data")
    tensors = [x for x in tf.nest.flatten(beside, expand_composites=True) if tf.is_symbolic_tensor(x)]
    if program is None or program.is_eager or not all(map(tf.is_symbolic_tensor, (found, *given))):
        return found
    if all(map(program.exists_here, (found, *given, *tensors))):
        facts = program.part(Facts)
        rows: list[Any] = [facts.of(x) for x in given]
        is_by_row = all(isinstance(x, Shard | Lengths) and not x.axis for x in rows)
        if is_by_row and all(isinstance(facts.of(x), Replicate) for x in tensors):
            facts.declare(found, Shard(0, rows[0].rows))
    return found


def _declared(partition: Any, found: Any, placement_of: Callable[[str], Placement]) -> Any:
    """Returns `found`, computed of a `partition` of rows of the batch, whose placement is that of the name of their lengths."""
    program, splits = rank_program(peers_on="data"), partition._row_splits
    if program is None or program.is_eager or not tf.is_symbolic_tensor(found):
        return found
    facts = program.part(Facts)
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
    repair = program.part(Repair)
    repair.look()
    return repair.now(found)
