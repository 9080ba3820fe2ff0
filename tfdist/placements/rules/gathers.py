"""Looking up, and its reverse: by rows in a table, among the rows by numbers of rows, sums over rows into a table."""

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Why
from tfdist.placements.rules.joins import gathered_lengths
from tfdist.placements.rules.meeting import axis_of, is_zero, merged, moved, same_along_rows
from tfdist.placements.rules.views import lengths_of

_SCATTERED = {"Add": How.SUM, "Sub": How.SUM, "Max": How.MAX, "Min": How.MIN, "Sum": How.SUM}


def gather(call: Call) -> Placement:
    """Of GatherV2, ResourceGather, Gather."""
    table, numbers = call.inputs[:2]
    batch_dims = 0 if call.type == "Gather" else call.attribute("batch_dims")
    if isinstance(table, Lengths):
        return gathered_lengths(call, table)
    if isinstance(table, Partial):
        call.need(isinstance(numbers, Replicate), Why.GOES_BACK if isinstance(numbers, Shard) else Why.FUNCTION)
        return Partial(table.how)
    call.need(not isinstance(numbers, Partial), Why.FUNCTION)
    ranks = [shape.rank for shape in call.shapes[:2]]
    axis = axis_of(call.value(2) if call.type == "GatherV2" else 0, ranks[0])
    call.need(axis is not None and batch_dims >= 0)
    if isinstance(numbers, Places):
        rows, is_flat = call.rows(0), ranks[1] == 1 or (ranks[1] == 2 and call.shapes[1][1] == 1)
        call.need(rows.axis == axis and not batch_dims and are_numbers_of(numbers, rows) and is_flat)
        return _chosen(numbers, rows)
    if isinstance(table, Shard) and isinstance(numbers, Shard):
        call.need(table.axis == numbers.axis < batch_dims)
        return merged(call, [0, 1], table.axis)
    if isinstance(numbers, Shard):
        call.need(numbers.axis >= batch_dims)
        return moved(numbers, axis + numbers.axis - batch_dims)
    rows = call.rows(0)
    call.need(batch_dims <= rows.axis != axis and (rows.axis < axis or ranks[1] is not None))
    return rows if rows.axis < axis else moved(rows, rows.axis - 1 + ranks[1] - batch_dims)


def gather_nd(call: Call) -> Placement:
    table, numbers = call.inputs[:2]
    rank = call.shapes[1].rank
    if isinstance(table, Partial):
        call.need(isinstance(numbers, Replicate), Why.GOES_BACK if isinstance(numbers, Shard) else Why.MEET)
        return Partial(table.how)
    if isinstance(numbers, Places):
        rows = call.rows(0)
        call.need(rows.axis == 0 and rank == 2 and are_numbers_of(numbers, rows))
        return _chosen(numbers, rows)
    if isinstance(table, Replicate):
        rows = call.rows(1)
        call.need(rank is not None and rows.axis < rank - 1)
        return rows
    rows, depth = call.rows(0), call.shapes[1][-1] if rank else None
    call.need(call.are_same(1) and depth is not None and rows.axis >= depth)
    return moved(rows, rows.axis - depth + rank - 1)


def are_numbers_of(numbers: Places, table: Shard | Lengths) -> bool:
    """Whether `numbers` are of the rows of `table`: tensors of one batch have equally many."""
    are_same = numbers.rows == table.rows or len(numbers.rows) == len(table.rows) == 1
    return bool(numbers.rows) and are_same and table.is_even and numbers.pieces == table.pieces is not None


def _chosen(numbers: Places, table: Shard) -> Shard:
    return Shard(table.axis, table.rows, numbers.are_all, table.pieces if numbers.are_all else None)


def segments(call: Call) -> Placement:
    """Of sums and extremes of those slices of the first input that have the same number in the second."""
    given, numbers, how = call.inputs[0], call.inputs[1], _how(call.type)
    is_sized = len(call.inputs) < 3 or call.are_same(2)
    if isinstance(given, Partial) and isinstance(numbers, Replicate) and is_sized:
        is_kept = (how is How.SUM and given.how not in (How.MAX, How.MIN)) or how is given.how
        call.need(is_kept, Why.FUNCTION)
        return Partial(given.how)
    rank = call.shapes[1].rank
    if isinstance(given, Shard) and isinstance(numbers, Places) and len(call.inputs) == 3:  # of values: into the rows they are of
        size = call.inputs[2]
        is_number = isinstance(size, Partial) and size.how is How.COUNT and len(size.rows) == len(numbers.rows) == 1
        call.need(is_number and given.axis == 0 and not numbers.are_all, Why.GOES_BACK)
        return Shard(0, numbers.rows, True, numbers.pieces)
    call.need(is_sized and rank is not None)
    if isinstance(given, Shard) and isinstance(numbers, Replicate):
        call.need(given.axis >= rank)
        return moved(given, given.axis - rank + 1)
    call.need(how is not None, Why.SOME_ROWS if "Mean" in call.type else Why.FUNCTION)
    is_by_row = isinstance(given, Shard) and isinstance(numbers, Shard) and given.axis == numbers.axis
    if isinstance(given, Replicate) and isinstance(numbers, Shard) and numbers.axis == 0 and call.shapes[0].rank:
        is_by_row = same_along_rows(call, 0, -call.shapes[0].rank, call.shapes[1][0])
    is_of_others = any(isinstance(x, Lengths | Partial | Places) for x in (given, numbers))
    call.need(is_by_row, Why.GOES_BACK if is_of_others else Why.MEET)
    merged(call, [0, 1], 0)
    call.need(call.type.startswith("Unsorted"), Why.SIZE)  # else the greatest number that a rank has tells how many there are
    return Partial(how)


def scatter(call: Call) -> Placement:
    """Of ScatterNd and the TensorScatter operations: numbers that are put into a tensor, or into zeros of a shape."""
    is_fresh = call.type == "ScatterNd"
    places, values, target = (0, 1, 2) if is_fresh else (1, 2, 0)
    numbers, given, into = call.inputs[places], call.inputs[values], call.inputs[target]
    if isinstance(numbers, Places):
        return _put_back(call, numbers, given, lengths_of(call, target) if is_fresh else into)
    how = How.SUM if is_fresh else _how(call.type)
    if isinstance(given, Partial) and call.are_same(places, target):
        call.need((given.is_sum or given.how is How.MEAN) and is_fresh, Why.FUNCTION)
        return Partial(given.how)
    rank = call.shapes[places].rank
    call.need(call.are_same(target) and rank is not None and call.rows(values).axis == call.rows(places).axis < rank - 1)
    merged(call, [places, values], 0)
    call.need(how is not None)
    call.need(how is not How.SUM or is_fresh or is_zero(call, target), Why.MIXED)
    return Partial(how)


def _put_back(call: Call, numbers: Places, given: Placement, into: Placement | None) -> Placement:
    """Returns rows, or zeros as many as there are rows, into which what is of some of them was put."""
    if not isinstance(into, Lengths | Shard) or into.axis or not are_numbers_of(numbers, into):
        return call.unknown(Why.MEET)
    # Rows without a name are as many as there are numbers, which the operation wants.
    wanted = 0, numbers.rows, numbers.are_all
    is_by_row = isinstance(given, Shard) and (given.axis, given.rows or numbers.rows, given.is_even) == wanted
    call.need(is_by_row and (numbers.are_all or len(numbers.rows) < 2))
    return Shard(0, into.rows, True, into.pieces)


def _how(kind: str) -> How | None:
    return next((how for name, how in _SCATTERED.items() if kind.endswith(name)), None)


def partition(call: Call) -> Placement:
    """Of DynamicPartition: those rows to which another tensor gives a number, for each number."""
    given = call.rows(0)
    call.need(given.axis == call.rows(1).axis == 0 and call.shapes[1].rank == 1 and len(given.rows) < 2)
    merged(call, [0, 1], 0)
    return Shard(0, given.rows, False, None)


def sparse_product(call: Call) -> Placement:
    """Of SparseTensorDenseMatMul of rows that were made sparse: indices, values, shape; and of a dense matrix."""
    call.need(not (call.attribute("adjoint_a") or call.attribute("adjoint_b")))
    return to_dense(call, shape=2, values=1)


def to_dense(call: Call, shape: int = 1, values: int = 2) -> Placement:
    """Of SparseToDense: indices, shape, values and what stands elsewhere."""
    numbers, size, given = call.inputs[0], call.inputs[shape], call.inputs[values]
    call.need(call.are_same(3))
    if not isinstance(numbers, Places) or not isinstance(size, Lengths) or size.axis or not are_numbers_of(numbers, size):
        return call.unknown(Why.MEET)
    is_by_row = isinstance(given, Shard) and (given.axis, given.rows) == (0, numbers.rows)
    call.need(is_by_row or (isinstance(given, Replicate) and call.shapes[values].rank == 0))
    return Shard(0, size.rows, True, size.pieces)
