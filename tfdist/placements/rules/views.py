"""Operations that give a tensor's numbers another shape, or take some: rows stay rows while they stay in order, and whole."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import tensorflow as tf

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Why
from tfdist.placements.rules.meeting import moved


def of_numbers(call: Call) -> Placement:
    """Returns what data movement makes of numbers of all rows: the same kind of numbers; of anything else, rows that met."""
    given, others = call.inputs[0], call.inputs[1:]
    if not isinstance(given, Partial):
        return call.unknown(Why.MEET)
    if not all(isinstance(x, Replicate) for x in others):
        return call.unknown(Why.GOES_BACK if any(isinstance(x, Shard | Lengths) for x in others) else Why.FUNCTION)
    is_one = call.shapes[0].num_elements() == 1 == call.results[0].num_elements()
    return Partial(given.how, given.rows if is_one else ())


def lengths_of(call: Call, place: int) -> Lengths | None:
    """Returns input number `place` as a shape of rows; None: it is none."""
    given = call.inputs[place]
    if (
        isinstance(given, Partial)
        and call.shapes[place].rank == 1
        and call.shapes[place][0] == 1
        and call.dtypes[place].is_integer
    ):
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
        is_column = all(shape.rank == 1 or (shape.rank == 2 and shape[1] == 1) for shape in (call.shapes[0], call.results[0]))
        return given if is_column else call.unknown(Why.MEET)
    if not isinstance(given, Shard):
        return given if isinstance(given, Lengths) and call.results[0].rank == 1 else of_numbers(call)
    lengths, before = lengths_of(call, 1), 1 if given.axis == 0 else _number(call.shapes[0], 0, given.axis)
    if before is None or (lengths is None and not isinstance(call.inputs[1], Replicate)):
        return call.unknown(Why.MEET)
    axis = _reshaped_axis(call, given, before) if lengths is None else lengths.axis
    if axis is None or _number(call.results[0], 0, axis) != before:
        return call.unknown(Why.MEET)
    return _reshaped(call, given, axis, lengths)


def _reshaped_axis(call: Call, given: Shard, before: int) -> int | None:
    """Returns the axis whose size is the one that varies with the rows; None: it is not known."""
    sizes, shape = call.elements(1), call.shapes[0]
    if shape.rank is None or shape[given.axis] is None:
        if sizes is not None and -1 in sizes:
            return sizes.index(-1)
        open_axes = [axis for axis, size in enumerate(call.results[0].as_list()) if size is None] if call.results[0].rank else []
        return open_axes[0] if len(open_axes) == 1 and sizes is None else None
    if sizes is None or (not call.results[0].is_fully_defined() and None in sizes):
        return None
    size, axis = shape[given.axis], given.axis
    new = call.results[0].as_list() if call.results[0].is_fully_defined() else [size or 0 for size in sizes]
    rows = size // given.pieces if given.pieces else 1  # of the batch
    if rows < 2:  # which of several axes of one it is, only the shape tells
        is_kept = size and new[: axis + 1] == shape.as_list()[: axis + 1] and new[axis + 1 : axis + 2] != [1]
        return axis if is_kept else None
    found = [b for b in range(len(new)) if math.prod(new[:b]) == before and new[b] > 1]
    return found[0] if found and new[found[0]] % rows == 0 else None


def _reshaped(call: Call, given: Shard, axis: int, lengths: Lengths | None) -> Placement:
    """Returns the rows behind a reshape that has left what is before them as it is."""
    if lengths is not None and lengths.rows and lengths.rows == given.rows and lengths.pieces is not None:
        return Shard(axis, given.rows, given.is_even and lengths.is_even, lengths.pieces)
    old, new = _number(call.shapes[0], given.axis + 1), _number(call.results[0], axis + 1)
    pieces = given.pieces * old // new if given.pieces and old and new and given.pieces * old % new == 0 else None
    if given.is_joined and pieces is None and not (old and new and old % new == 0):
        return call.unknown(Why.MEET)
    return Shard(axis, given.rows, given.is_even, pieces)


def _number(shape: tf.TensorShape, start: int, stop: int | None = None) -> int | None:
    """Returns how many elements axes `start` to `stop` have together; None: it is not known."""
    sizes = None if shape.rank is None else shape.as_list()[start:stop]
    return None if sizes is None or None in sizes else math.prod(sizes)


def transpose(call: Call) -> Placement:
    given, order = call.inputs[0], call.value(1)
    if not isinstance(given, Shard):
        return of_numbers(call)
    return call.unknown(Why.MEET) if order is None else moved(given, [int(axis) for axis in order].index(given.axis))


def expand_dims(call: Call) -> Placement:
    given, axis, rank = call.inputs[0], call.value(1), call.shapes[0].rank
    if isinstance(given, Partial):
        return of_numbers(call)
    if axis is None or (axis < 0 and rank is None):
        return call.unknown(Why.MEET)
    place = int(axis.reshape(-1)[0]) if axis >= 0 else int(axis.reshape(-1)[0]) + rank + 1
    if isinstance(given, Places) and rank == 1 and place == 1:
        return given
    return moved(given, given.axis + (place <= given.axis)) if isinstance(given, Shard) else call.unknown(Why.MEET)


def squeeze(call: Call) -> Placement:
    given, axes, rank = call.inputs[0], list(call.attribute("squeeze_dims")), call.shapes[0].rank
    if isinstance(given, Partial):
        return of_numbers(call)
    if rank is None and (not axes or min(axes) < 0):
        return call.unknown(Why.MEET)
    if not axes:
        axis = given.axis if isinstance(given, Shard) else 0
        if any(size is None for size in call.shapes[0]) or call.shapes[0][axis] == 1:
            return call.unknown(Why.MEET)  # one row would lose its axis
        axes = [place for place, size in enumerate(call.shapes[0]) if size == 1]
    axes = [axis % rank if axis < 0 else axis for axis in axes]
    if isinstance(given, Places) and rank == 2 and axes == [1]:
        return given
    if not isinstance(given, Shard) or given.axis in axes:
        return call.unknown(Why.MEET)
    return moved(given, given.axis - sum(axis < given.axis for axis in axes))


def tile(call: Call) -> Placement:
    given, times, lengths = call.inputs[0], call.elements(1), lengths_of(call, 1)
    if isinstance(given, Replicate) and lengths is not None:
        size = call.shapes[0][lengths.axis] if call.shapes[0].rank is not None else None
        is_repeated = size == 1 or (size is not None and len(lengths.rows) < 2)
        pieces = size * lengths.pieces if lengths.pieces and size else None
        return dataclasses.replace(_filled(lengths), pieces=pieces) if is_repeated else call.unknown(Why.MEET)
    if not isinstance(given, Shard):
        return of_numbers(call)
    is_alone = isinstance(call.inputs[1], Replicate) and times is not None and times[given.axis] == 1
    return given if is_alone else call.unknown(Why.MEET)


def fill(call: Call) -> Placement:
    lengths, value = lengths_of(call, 0), call.inputs[1]
    if lengths is not None:
        is_same = isinstance(value, Replicate)
        return _filled(lengths) if is_same else call.unknown(Why.GOES_BACK if isinstance(value, Partial) else Why.MEET)
    return value if isinstance(call.inputs[0], Replicate) and isinstance(value, Partial) else call.unknown(Why.SIZE)


def broadcast_to(call: Call) -> Placement:
    given, lengths, rank, new = call.inputs[0], lengths_of(call, 1), call.shapes[0].rank, call.results[0].rank
    if isinstance(given, Partial) or rank is None or (lengths is None and not isinstance(call.inputs[1], Replicate)):
        return of_numbers(call)
    if lengths is not None and isinstance(given, Replicate):
        axis = None if new is None else lengths.axis - new + rank
        is_repeated = rank == 0 or (axis is not None and (axis < 0 or call.shapes[0][axis] == 1))
        is_repeated = is_repeated or (axis is not None and call.is_alike(0, axis - rank))
        return _filled(lengths) if is_repeated else call.unknown(Why.MEET)
    if not isinstance(given, Shard) or new is None:
        return call.unknown(Why.MEET)
    axis, size = given.axis - rank + new, call.shapes[0][given.axis]
    if lengths is not None:
        are_one_by_one = given.rows == lengths.rows or not (given.is_joined or len(lengths.rows) > 1)
        are_one_by_one = given.rows == lengths.rows or not (given.is_joined or len(lengths.rows) > 1)
        is_as_long = axis == lengths.axis and given.is_even and lengths.is_even and are_one_by_one
        return moved(given, axis) if is_as_long else call.unknown(Why.MEET)
    return moved(given, axis) if size is not None and size == call.results[0][axis] else call.unknown(Why.MEET)


def _filled(lengths: Lengths) -> Shard:
    return Shard(lengths.axis, lengths.rows, lengths.is_even, lengths.pieces)


def pad(call: Call) -> Placement:
    given, around = call.inputs[0], call.value(1)
    if isinstance(given, Shard):
        is_free = around is not None and not np.any(around[given.axis]) and isinstance(call.inputs[-1], Replicate)
        return given if is_free else call.unknown(Why.MEET)
    if call.type == "PadV2" and isinstance(given, Partial) and given.is_sum and np.any(call.value(2) != 0):
        return call.unknown(Why.MIXED)
    return of_numbers(call)


def along_axes(call: Call, place: int, first: int = 0) -> Placement:
    """Of what changes the order of numbers along the axes that input number `place` names."""
    given, axes, rank = call.inputs[first], call.value(place), call.shapes[first].rank
    if not isinstance(given, Shard):
        return of_numbers(call)
    if axes is None or rank is None or not all(isinstance(x, Replicate) for x in call.inputs if x is not given):
        return call.unknown(Why.MEET)
    return call.unknown(Why.MEET) if given.axis in {int(axis) % rank for axis in axes.reshape(-1)} else given


def reverse_sequence(call: Call) -> Placement:
    given, lengths = call.inputs
    is_by_row = isinstance(given, Shard) and given.axis == call.attribute("batch_dim") and lengths == moved(given, 0)
    is_apart = isinstance(given, Shard) and isinstance(lengths, Replicate) and given.axis != call.attribute("batch_dim")
    is_free = isinstance(given, Shard) and given.axis != call.attribute("seq_dim")
    return given if (is_by_row or is_apart) and is_free else call.unknown(Why.MEET)


def by_rows(call: Call, inner: int = 0) -> Placement:
    """Of one that takes the last `inner` axes of its first input together, and all before them one by one."""
    given, rank = call.inputs[0], call.shapes[0].rank
    is_outer = isinstance(given, Shard) and rank is not None and given.axis < rank - inner
    others = all(isinstance(x, Replicate) for x in call.inputs[1:])
    return given if is_outer and others else call.unknown(Why.MEET if isinstance(given, Shard) else Why.FUNCTION)


def numbers_up_to(call: Call) -> Placement:
    """Of Range: the numbers of rows, from 0 to how many there are."""
    start, stop, step = (call.value(place) for place in range(3))
    limit = call.inputs[1]
    is_of_rows = start is not None and start == 0 and step is not None and step == 1
    if isinstance(limit, Partial) and limit.how is How.COUNT and limit.rows and is_of_rows:
        return Places(True, limit.rows)
    return call.unknown(Why.SIZE)


def places_where(call: Call) -> Placement:
    given = call.inputs[0]
    if not isinstance(given, Shard) or given.axis:
        return call.unknown(Why.MEET)
    return Places(False, given.rows, given.pieces)


def one_hot(call: Call) -> Placement:
    given, axis = call.inputs[0], call.attribute("axis")
    if not isinstance(given, Shard) or not all(isinstance(x, Replicate) for x in call.inputs[1:]):
        return call.unknown(Why.MEET if isinstance(given, Shard) else Why.FUNCTION)
    return moved(given, given.axis + (0 <= axis <= given.axis))


def unpack(call: Call) -> Placement:
    given, axis, rank = call.inputs[0], call.attribute("axis"), call.shapes[0].rank
    if isinstance(given, Partial):
        return Partial(given.how)
    if not isinstance(given, Shard) or (axis < 0 and rank is None):
        return call.unknown(Why.MEET)
    axis = axis + rank if axis < 0 else axis
    return call.unknown(Why.MEET) if axis == given.axis else moved(given, given.axis - (axis < given.axis))
