"""Looking up, and its reverse: by rows in a table, among the rows by numbers of rows, sums over rows into a table."""

from __future__ import annotations

import numpy as np

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Why
from tfdist.placements.rules.joins import gathered_lengths
from tfdist.placements.rules.meeting import is_zero, merged, moved, other_than_rows, same_along_rows
from tfdist.placements.rules.views import lengths_of

_SCATTERED = {"Add": How.SUM, "Sub": How.SUM, "Max": How.MAX, "Min": How.MIN, "Sum": How.SUM}


def gather(call: Call) -> Placement:
    """Of GatherV2, ResourceGather, Gather."""
    table, numbers = call.inputs[:2]
    place = call.value(2) if call.type == "GatherV2" else np.asarray(0)
    batch_dims = 0 if call.type == "Gather" else call.attribute("batch_dims")
    if isinstance(table, Lengths):
        return gathered_lengths(call, table)
    if isinstance(table, Partial):
        if isinstance(numbers, Replicate):
            return Partial(table.how)
        return call.unknown(Why.GOES_BACK if isinstance(numbers, Shard) else Why.FUNCTION)
    ranks = [shape.rank for shape in call.shapes[:2]]
    if place is None or (place < 0 and ranks[0] is None) or batch_dims < 0 or isinstance(numbers, Partial):
        return call.unknown(Why.FUNCTION if isinstance(numbers, Partial) else Why.MEET)
    axis = int(place) % ranks[0] if place < 0 else int(place)
    if isinstance(numbers, Places):
        is_own = isinstance(table, Shard) and table.axis == axis and not batch_dims and are_numbers_of(numbers, table)
        is_flat = ranks[1] == 1 or (ranks[1] == 2 and call.shapes[1][1] == 1)
        return _chosen(numbers, table) if is_own and is_flat and isinstance(table, Shard) else call.unknown(Why.MEET)
    if isinstance(table, Shard) and isinstance(numbers, Shard):
        is_same = table.axis == numbers.axis < batch_dims
        return merged(call, [0, 1], table.axis) if is_same else call.unknown(Why.MEET)
    if isinstance(numbers, Shard):
        return moved(numbers, axis + numbers.axis - batch_dims) if numbers.axis >= batch_dims else call.unknown(Why.MEET)
    if not isinstance(table, Shard) or table.axis < batch_dims or table.axis == axis:
        return call.unknown(Why.MEET)
    if table.axis < axis:
        return table
    return moved(table, table.axis - 1 + ranks[1] - batch_dims) if ranks[1] is not None else call.unknown(Why.MEET)


def gather_nd(call: Call) -> Placement:
    table, numbers = call.inputs[:2]
    rank = call.shapes[1].rank
    if isinstance(table, Partial) and isinstance(numbers, Replicate):
        return Partial(table.how)
    if isinstance(numbers, Places) and isinstance(table, Shard) and table.axis == 0 and rank == 2:
        return _chosen(numbers, table) if are_numbers_of(numbers, table) else call.unknown(Why.MEET)
    if isinstance(table, Replicate) and isinstance(numbers, Shard) and rank is not None and numbers.axis < rank - 1:
        return numbers
    depth = call.shapes[1][-1] if rank else None
    if isinstance(table, Shard) and isinstance(numbers, Replicate) and depth is not None and table.axis >= depth:
        return moved(table, table.axis - depth + rank - 1)
    return call.unknown(Why.GOES_BACK if isinstance(table, Partial) and isinstance(numbers, Shard) else Why.MEET)


def are_numbers_of(numbers: Places, table: Shard | Lengths) -> bool:
    """Whether `numbers` are of the rows of `table`: tensors of one batch have equally many."""
    are_same = numbers.rows == table.rows or len(numbers.rows) == len(table.rows) == 1
    return bool(numbers.rows) and are_same and table.is_even and numbers.pieces == table.pieces is not None


def _chosen(numbers: Places, table: Shard) -> Shard:
    return Shard(table.axis, table.rows, numbers.are_all, table.pieces if numbers.are_all else None)


def segments(call: Call) -> Placement:
    """Of sums and extremes of those slices of the first input that have the same number in the second."""
    given, numbers, how = call.inputs[0], call.inputs[1], _how(call.type)
    size = call.inputs[2] if len(call.inputs) > 2 else Replicate()
    if isinstance(given, Partial) and isinstance(numbers, Replicate) and isinstance(size, Replicate):
        is_kept = (how is How.SUM and given.how not in (How.MAX, How.MIN)) or how is given.how
        return Partial(given.how) if is_kept else call.unknown(Why.FUNCTION)
    rank = call.shapes[1].rank
    if not isinstance(size, Replicate) or rank is None:
        return call.unknown(Why.MEET)
    if isinstance(given, Shard) and isinstance(numbers, Replicate):
        return moved(given, given.axis - rank + 1) if given.axis >= rank else call.unknown(Why.MEET)
    if how is None:
        return call.unknown(Why.SOME_ROWS if "Mean" in call.type else Why.FUNCTION)
    is_by_row = isinstance(given, Shard) and isinstance(numbers, Shard) and given.axis == numbers.axis
    if isinstance(given, Replicate) and isinstance(numbers, Shard) and numbers.axis == 0 and call.shapes[0].rank:
        is_by_row = same_along_rows(call, 0, -call.shapes[0].rank, call.shapes[1][0])
    is_open = call.type.startswith("Unsorted")  # else the greatest number that a rank has tells how many there are
    if is_by_row and isinstance(merged(call, [0, 1], 0), Shard):
        return Partial(how) if is_open else call.unknown(Why.SIZE)
    return call.unknown(Why.MEET if other_than_rows(call, [0, 1]) is None else Why.GOES_BACK)


def scatter(call: Call) -> Placement:
    """Of ScatterNd and the TensorScatter operations: numbers that are put into a tensor, or into zeros of a shape."""
    is_fresh = call.type == "ScatterNd"
    places, values, target = (0, 1, 2) if is_fresh else (1, 2, 0)
    numbers, given, into = call.inputs[places], call.inputs[values], call.inputs[target]
    if isinstance(numbers, Places):
        return _put_back(call, numbers, given, lengths_of(call, target) if is_fresh else into)
    how = How.SUM if is_fresh else _how(call.type)
    if isinstance(given, Partial) and all(isinstance(x, Replicate) for x in (numbers, into)):
        is_clean = (given.is_sum or given.how is How.MEAN) and is_fresh
        return Partial(given.how) if is_clean else call.unknown(Why.FUNCTION)
    rank = call.shapes[places].rank
    is_row = (
        isinstance(numbers, Shard) and isinstance(given, Shard) and rank is not None and given.axis == numbers.axis < rank - 1
    )
    if not is_row or not isinstance(into, Replicate) or not isinstance(merged(call, [places, values], 0), Shard):
        return call.unknown(Why.MEET)
    if how is None:
        return call.unknown(Why.MEET)
    is_added_to = how is How.SUM and not is_fresh and not is_zero(call, target)
    return call.unknown(Why.MIXED) if is_added_to else Partial(how)


def _put_back(call: Call, numbers: Places, given: Placement, into: Placement | None) -> Placement:
    """Returns rows, or zeros as many as there are rows, into which what is of some of them was put."""
    if not isinstance(into, Lengths | Shard) or into.axis or not are_numbers_of(numbers, _rows_of(into)):
        return call.unknown(Why.MEET)
    is_by_row = isinstance(given, Shard) and (given.axis, given.rows, given.is_even) == (0, numbers.rows, numbers.are_all)
    is_in_order = numbers.are_all or len(numbers.rows) < 2
    return Shard(0, into.rows, True, into.pieces) if is_by_row and is_in_order else call.unknown(Why.MEET)


def _rows_of(given: Lengths | Shard) -> Shard:
    return Shard(given.axis, given.rows, given.is_even, given.pieces)


def _how(kind: str) -> How | None:
    return next((how for name, how in _SCATTERED.items() if kind.endswith(name)), None)


def partition(call: Call) -> Placement:
    """Of DynamicPartition: those rows to which another tensor gives a number, for each number."""
    given, numbers = call.inputs
    is_by_row = isinstance(given, Shard) and isinstance(numbers, Shard) and given.axis == numbers.axis == 0
    if not is_by_row or call.shapes[1].rank != 1 or not isinstance(merged(call, [0, 1], 0), Shard):
        return call.unknown(Why.MEET)
    return Shard(0, given.rows, False, None) if isinstance(given, Shard) and len(given.rows) < 2 else call.unknown(Why.MEET)


def sparse_product(call: Call) -> Placement:
    """Of SparseTensorDenseMatMul of rows that were made sparse: indices, values, shape; and of a dense matrix."""
    numbers, values, shape, dense = call.inputs
    is_plain = not (call.attribute("adjoint_a") or call.attribute("adjoint_b")) and isinstance(dense, Replicate)
    return _dense_rows(call, numbers, values, shape) if is_plain else call.unknown(Why.MEET)


def to_dense(call: Call) -> Placement:
    """Of SparseToDense: indices, shape, values and what stands elsewhere."""
    numbers, shape, values, other = call.inputs
    return _dense_rows(call, numbers, values, shape) if isinstance(other, Replicate) else call.unknown(Why.MEET)


def _dense_rows(call: Call, numbers: Placement, values: Placement, shape: Placement) -> Placement:
    if not (
        isinstance(numbers, Places) and isinstance(shape, Lengths) and shape.axis == 0 and isinstance(values, Shard | Replicate)
    ):
        return call.unknown(Why.MEET)
    is_of_rows = are_numbers_of(numbers, shape) and (
        isinstance(values, Replicate) or (values.axis, values.rows) == (0, numbers.rows)
    )
    is_one_value = isinstance(values, Shard) or call.shapes[2 if call.type == "SparseToDense" else 1].rank == 0
    return Shard(0, shape.rows, True, shape.pieces) if is_of_rows and is_one_value else call.unknown(Why.MEET)
