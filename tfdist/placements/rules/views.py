"""Operations that give a tensor's numbers another shape, or take some: rows stay rows while they stay in order, and whole."""

import dataclasses
import math

import numpy as np
import tensorflow as tf

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Why
from tfdist.placements.rules.meeting import axis_of, moved, rows_of


def of_numbers(call: Call) -> Placement:
    """Returns what data movement makes of numbers of all rows: the same kind of numbers; of anything else, rows that met."""
    given, others = call.inputs[0], call.inputs[1:]
    if not isinstance(given, Partial):
        return call.unknown(Why.MEET)
    goes_back = any(isinstance(x, Shard | Lengths) for x in others)
    call.need(all(isinstance(x, Replicate) for x in others), Why.GOES_BACK if goes_back else Why.FUNCTION)
    is_one = call.shapes[0].num_elements() == 1 == call.results[0].num_elements()
    return Partial(given.how, given.rows if is_one else ())


def lengths_of(call: Call, place: int) -> Lengths | None:
    """Returns input number `place` as a shape of rows; None: it is none."""
    given, shape = call.inputs[place], call.shapes[place]
    if isinstance(given, Partial) and shape.rank == 1 and shape[0] == 1 and call.dtypes[place].is_integer:
        return as_lengths(given, 0)
    return given if isinstance(given, Lengths) else None


def as_lengths(number: Partial, axis: int) -> Lengths | None:
    """Returns the shape whose element `axis` is `number` of rows; None: that is no number of them."""
    if not number.is_sum or number.how is How.SHARE:
        return None
    return Lengths(axis, number.rows, number.how is How.COUNT, 1 if number.rows else None)


def reshape(call: Call) -> Placement:
    given = call.inputs[0]
    if isinstance(given, Places):
        call.need(all(shape.rank == 1 or (shape.rank == 2 and shape[1] == 1) for shape in (call.shapes[0], call.results[0])))
        return given
    if not isinstance(given, Shard):
        return given if isinstance(given, Lengths) and call.results[0].rank == 1 else of_numbers(call)
    lengths, before = lengths_of(call, 1), 1 if given.axis == 0 else _number(call.shapes[0], 0, given.axis)
    call.need(before is not None and (lengths is not None or call.are_same(1)))
    axis = _reshaped_axis(call, given, before) if lengths is None else lengths.axis
    call.need(axis is not None and _number(call.results[0], 0, axis) == before)
    if lengths is not None and lengths.rows and lengths.rows == given.rows and lengths.pieces is not None:
        return Shard(axis, given.rows, given.is_even and lengths.is_even, lengths.pieces)
    old, new = _number(call.shapes[0], given.axis + 1), _number(call.results[0], axis + 1)
    is_split = bool(old and new and old % new == 0)
    pieces = given.pieces * old // new if given.pieces and old and new else None
    call.need(pieces is None or given.pieces * old % new == 0, Why.MEET)  # else in groups of rows
    call.need(not given.is_joined or pieces is not None or is_split)
    return Shard(axis, given.rows, given.is_even, pieces)


def _reshaped_axis(call: Call, given: Shard, before: int) -> int | None:
    """Returns the axis whose size is the one that varies with the rows; None: it is not known."""
    sizes, shape, result = call.elements(1), call.shapes[0], call.results[0]
    old = [] if shape.rank is None else shape.as_list()
    if old and old[given.axis] is None and sizes is not None and -1 not in sizes:
        old[given.axis] = call.read[0].shape[given.axis]  # the rank's own number, hidden where ranks' differ
    if not old or old[given.axis] is None:
        if sizes is not None and -1 in sizes:
            return sizes.index(-1)
        open_axes = [axis for axis, size in enumerate(result.as_list()) if size is None] if result.rank else []
        return open_axes[0] if len(open_axes) == 1 and sizes is None else None
    if sizes is None or (not result.is_fully_defined() and None in sizes):
        return None
    new = result.as_list() if result.is_fully_defined() else [size or 0 for size in sizes]
    rows = old[given.axis] // given.pieces if given.pieces else 1  # of the batch
    if rows < 2:
        return _axis_of_one_row(given, old, sizes, new, before)
    found = [b for b in range(len(new)) if math.prod(new[:b]) == before and new[b] > 1]
    is_group = bool(found) and -1 in sizes[: found[0]]  # of as many rows as the rank has: groups of the batch are more
    return found[0] if found and not is_group and new[found[0]] % rows == 0 else None


def _axis_of_one_row(given: Shard, old: list[int], sizes: list[int | None], new: list[int], before: int) -> int | None:
    """Returns along which axis one row lies, or none, in the shape `new`, of which the code has said `sizes`: axes of size 1 in
    front of others look alike."""
    axis = given.axis
    if 0 in new:
        return new.index(0) if new.count(0) == 1 else None
    found = [b for b in range(len(new)) if math.prod(new[:b]) == before]
    if -1 in sizes and 1 not in sizes:
        return sizes.index(-1) if sizes.index(-1) in found else None
    if len(found) == 1:
        return found[0]
    is_kept = new[: axis + 1] == old[: axis + 1] and new[axis + 1 : axis + 2] != [1]
    is_apart_again = bool(found) and given.pieces != 1 and new[found[0] : found[0] + 2] == [1, given.pieces]
    return axis if is_kept else found[0] if is_apart_again else None


def _number(shape: tf.TensorShape, start: int, stop: int | None = None) -> int | None:
    """Returns how many elements axes `start` to `stop` have together; None: it is not known."""
    sizes = None if shape.rank is None else shape.as_list()[start:stop]
    return None if sizes is None or None in sizes else math.prod(sizes)


def transpose(call: Call) -> Placement:
    given, order = call.inputs[0], call.value(1)
    if not isinstance(given, Shard):
        return of_numbers(call)
    call.need(order is not None)
    return moved(given, order.tolist().index(given.axis))


def expand_dims(call: Call) -> Placement:
    given, rank = call.inputs[0], call.shapes[0].rank
    if isinstance(given, Partial):
        return of_numbers(call)
    axis = axis_of(call.value(1), None if rank is None else rank + 1)
    if isinstance(given, Places) and rank == axis == 1:
        return given
    given = call.rows(0)
    call.need(axis is not None)
    return moved(given, given.axis + (axis <= given.axis))


def squeeze(call: Call) -> Placement:
    given, axes, rank = call.inputs[0], list(call.attribute("squeeze_dims")), call.shapes[0].rank
    if isinstance(given, Partial):
        return of_numbers(call)
    call.need(rank is not None or (bool(axes) and min(axes) >= 0))
    if not axes:
        is_one = call.shapes[0][given.axis if isinstance(given, Shard) else 0] == 1  # row, which would lose its axis
        call.need(call.shapes[0].is_fully_defined() and not is_one)
        axes = [place for place, size in enumerate(call.shapes[0]) if size == 1]
    axes = [axis % rank if axis < 0 else axis for axis in axes]
    if isinstance(given, Places) and rank == 2 and axes == [1]:
        return given
    given = call.rows(0)
    call.need(given.axis not in axes)
    return moved(given, given.axis - sum(axis < given.axis for axis in axes))


def tile(call: Call) -> Placement:
    given, times, lengths = call.inputs[0], call.elements(1), lengths_of(call, 1)
    if isinstance(given, Replicate) and lengths is not None:
        size = call.shapes[0][lengths.axis] if call.shapes[0].rank is not None else None
        call.need(size == 1 or (size is not None and len(lengths.rows) < 2))
        return dataclasses.replace(rows_of(lengths), pieces=size * lengths.pieces if lengths.pieces and size else None)
    if not isinstance(given, Shard):
        return of_numbers(call)
    call.need(call.are_same(1) and times is not None and times[given.axis] == 1)
    return given


def fill(call: Call) -> Placement:
    lengths, value = lengths_of(call, 0), call.inputs[1]
    if lengths is not None:
        call.need(isinstance(value, Replicate), Why.GOES_BACK if isinstance(value, Partial) else Why.MEET)
        return rows_of(lengths)
    call.need(call.are_same(0) and isinstance(value, Partial), Why.SIZE)
    return value


def broadcast_to(call: Call) -> Placement:
    given, lengths, rank, new = call.inputs[0], lengths_of(call, 1), call.shapes[0].rank, call.results[0].rank
    if isinstance(given, Partial) or rank is None or (lengths is None and not call.are_same(1)):
        return of_numbers(call)
    if lengths is not None and isinstance(given, Replicate):
        axis = None if new is None else lengths.axis - new + rank
        is_repeated = rank == 0 or (axis is not None and (axis < 0 or call.shapes[0][axis] == 1))
        call.need(is_repeated or (axis is not None and call.is_alike(0, axis - rank)))
        return rows_of(lengths)
    given = call.rows(0)
    call.need(new is not None)
    axis, size = given.axis - rank + new, call.shapes[0][given.axis]
    if lengths is None:
        call.need(size is not None and size == call.results[0][axis])
    else:
        call.need(axis == lengths.axis and given.is_even and lengths.is_even)
        call.need(given.rows == lengths.rows or not (given.is_joined or len(lengths.rows) > 1))
    return moved(given, axis)


def pad(call: Call) -> Placement:
    given, around = call.inputs[0], call.value(1)
    if isinstance(given, Shard):
        call.need(around is not None and not np.any(around[given.axis]) and call.are_same(len(call.inputs) - 1))
        return given
    is_mixed = call.type == "PadV2" and isinstance(given, Partial) and given.is_sum and np.any(call.value(2) != 0)
    call.need(not is_mixed, Why.MIXED)
    return of_numbers(call)


def along_axes(call: Call, place: int) -> Placement:
    """Of what changes the order of numbers along the axes that input number `place` names."""
    given, axes, rank = call.inputs[0], call.value(place), call.shapes[0].rank
    if not isinstance(given, Shard):
        return of_numbers(call)
    call.need(axes is not None and rank is not None and call.are_same(*range(1, len(call.inputs))))
    call.need(given.axis not in {int(axis) % rank for axis in axes.reshape(-1)})
    return given


def reverse_sequence(call: Call) -> Placement:
    given, lengths, axis = call.rows(0), call.inputs[1], call.attribute("batch_dim")
    call.need(lengths == moved(given, 0) if given.axis == axis else isinstance(lengths, Replicate))
    call.need(given.axis != call.attribute("seq_dim"))
    return given


def by_rows(call: Call, inner: int = 0, first: int = 0) -> Placement:
    """Of one that takes the last `inner` axes of input number `first` together, and all before them one by one."""
    given, rank = call.rows(first, Why.FUNCTION), call.shapes[first].rank
    call.need(not inner or (rank is not None and given.axis < rank - inner))
    call.need(call.are_same(*range(first + 1, len(call.inputs))))
    return given


def numbers_up_to(call: Call) -> Placement:
    """Of Range: the numbers of rows, from 0 to how many there are."""
    start, limit, step = call.value(0), call.inputs[1], call.value(2)
    if not isinstance(limit, Partial) or limit.how is not How.COUNT or not limit.rows:
        return call.unknown(Why.SIZE)
    call.need(start is not None and start == 0 and step is not None and step == 1, Why.SIZE)
    return Places(True, limit.rows)


def places_where(call: Call) -> Placement:
    given = call.rows(0)
    call.need(given.axis == 0)
    return Places(False, given.rows, given.pieces)


def one_hot(call: Call) -> Placement:
    given, axis = call.rows(0, Why.FUNCTION), call.attribute("axis")
    call.need(call.are_same(*range(1, len(call.inputs))))
    return moved(given, given.axis + (0 <= axis <= given.axis))


def unpack(call: Call, axis: int | None = None) -> Placement:
    """Of pieces cut along `axis`, or that of the attribute."""
    if isinstance(call.inputs[0], Partial):
        return Partial(call.inputs[0].how)
    given, axis = call.rows(0), axis_of(call.attribute("axis") if axis is None else axis, call.shapes[0].rank)
    call.need(axis is not None and axis != given.axis)
    return moved(given, given.axis - (axis < given.axis))
