"""Where tensors meet element by element: whether their rows lie side by side, as those of one device would."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from tfdist.placements.call import Call, NotKnown
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Why

OTHER_END = {How.MAX: How.MIN, How.MIN: How.MAX}


def aligned(call: Call, places: Iterable[int] | None = None) -> Shard:
    """Returns what inputs number `places` (all), of which some are rows, make element by element, or stacked.

    This is all that is known of most operations on each element.
    """
    places = list(range(len(call.inputs)) if places is None else places)
    only_rows(call, places)
    shards, ranks = shards_among(call, places), [call.shapes[place].rank for place in places]
    call.need(None not in ranks)
    from_end = {shard.axis - call.shapes[place].rank for place, shard in shards.items()}
    call.need(len(from_end) == 1)
    (axis,) = from_end
    size = next(call.shapes[place][axis] for place in shards)
    call.need(all(same_along_rows(call, place, axis, size) for place in places))
    return merged(call, places, max(ranks) + axis)


def shards_among(call: Call, places: Iterable[int]) -> dict[int, Shard]:
    """Returns those among inputs number `places` that are rows, by number."""
    return {place: given for place in places if isinstance(given := call.inputs[place], Shard)}


def merged(call: Call, places: Iterable[int], axis: int) -> Shard:
    """Returns the rows that those among inputs number `places` are together, along `axis`; they are as many in each."""
    shards = list(shards_among(call, places).values())
    names = {shard.rows for shard in shards}
    are_even = all(shard.is_even for shard in shards)
    if any(shard.is_joined for shard in shards):
        call.need(len(names) == 1 and (are_even or len(shards) == 1))
    rows = next((shard.rows for shard in shards if shard.rows), ())
    pieces = {shard.pieces for shard in shards if shard.rows == rows}
    return Shard(axis, rows, are_even, pieces.pop() if len(pieces) == 1 else None)


def only_rows(call: Call, places: Iterable[int]) -> None:
    """Raises NotKnown if there is something among inputs number `places` that is neither rows nor the same on all ranks."""
    found = [call.inputs[place] for place in places]
    call.need(not any(isinstance(x, Lengths | Places) for x in found))
    has_rows = any(isinstance(x, Shard) for x in found)
    call.need(not any(isinstance(x, Partial) for x in found), Why.GOES_BACK if has_rows else Why.FUNCTION)


def met(call: Call) -> Placement:
    """Of an operation that compares, or puts together, all that it is given."""
    only_rows(call, range(len(call.inputs)))
    raise NotKnown(Why.MEET)


def linear_in(call: Call, given: Partial, factor: np.ndarray | float | None = None) -> Partial:
    """Returns what a linear function makes of numbers of all rows: `factor` times that, if it is known."""
    if given.how not in OTHER_END:
        return Partial(given.how)
    is_positive, is_negative = (factor is not None and bool(np.size(factor) and np.all(factor * sign > 0)) for sign in (1, -1))
    call.need(is_positive or is_negative, Why.FUNCTION)
    return Partial(given.how if is_positive else OTHER_END[given.how])


def same_along_rows(call: Call, place: int, axis: int, size: int | None) -> bool:
    """Whether input number `place` is rows along `axis`, counted from the end, or of one value along it for all `size` rows.

    Numbers that a rank has drawn, as many as it has rows, are one for each of its rows.
    """
    shape, placement = call.shapes[place], call.inputs[place]
    if shape.rank is None:
        return False
    if isinstance(placement, Shard):
        return shape[axis] == size
    if shape.rank < -axis or shape[axis] == 1:
        return True
    if size is None and call.is_alike(place, axis):  # a number of rows that is not known here fits it
        return True
    if size is None or shape[axis] != size:
        return False
    return (isinstance(placement, Replicate) and placement.is_drawn) or call.is_alike(place, axis)


def is_zero(call: Call, place: int) -> bool:
    """Whether input number `place` is known to be all zeros."""
    value = call.value(place)
    return value is not None and value.dtype.kind in "biufc" and not np.any(value)


def moved(shard: Shard, axis: int) -> Shard:
    """Returns `shard` along another axis."""
    return dataclasses.replace(shard, axis=axis)


def rows_of(given: Lengths | Places | Shard) -> Shard:
    """Returns the rows whose number, or numbers, are `given`."""
    if isinstance(given, Places):
        return Shard(0, given.rows, given.are_all, given.pieces if given.are_all else None)
    return Shard(given.axis, given.rows, given.is_even, given.pieces)


def axis_of(axis: np.ndarray | int | None, rank: int | None) -> int | None:
    """Returns `axis`, one number, counted from the start; None: it is not known."""
    place = None if axis is None else int(np.reshape(axis, -1)[0])
    return place if place is None or place >= 0 else None if rank is None else place + rank
