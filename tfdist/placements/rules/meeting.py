"""Where tensors meet element by element: whether their rows lie side by side, as those of one device would."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from tfdist.placements.call import Call
from tfdist.placements.kinds import Lengths, Partial, Placement, Places, Replicate, Shard, Unknown, Why


def aligned(call: Call, places: Iterable[int] | None = None) -> Placement:
    """Returns what inputs number `places` (all), of which some are rows, make element by element, or stacked."""
    places = list(range(len(call.inputs)) if places is None else places)
    if (other := other_than_rows(call, places)) is not None:
        return other
    ranks = [call.shapes[place].rank for place in places]
    if None in ranks:
        return call.unknown(Why.MEET)
    from_end = {shard.axis - call.shapes[place].rank for place, shard in shards_among(call, places).items()}
    if len(from_end) != 1:
        return call.unknown(Why.MEET)
    (axis,) = from_end
    if not all(same_along_rows(call, place, axis, _row_size(call, places, axis)) for place in places):
        return call.unknown(Why.MEET)
    return merged(call, places, max(ranks) + axis)


def shards_among(call: Call, places: Iterable[int]) -> dict[int, Shard]:
    """Returns those among inputs number `places` that are rows, by number."""
    return {place: given for place in places if isinstance(given := call.inputs[place], Shard)}


def merged(call: Call, places: Iterable[int], axis: int) -> Shard | Unknown:
    """Returns the rows that those among inputs number `places` are together, along `axis`; they are as many in each."""
    shards = list(shards_among(call, places).values())
    names = {shard.rows for shard in shards}
    are_even = all(shard.is_even for shard in shards)
    if any(shard.is_joined for shard in shards) and (len(names) > 1 or (not are_even and len(shards) > 1)):
        return call.unknown(Why.MEET)
    rows = next((shard.rows for shard in shards if shard.rows), ())
    pieces = {shard.pieces for shard in shards if shard.rows == rows}
    return Shard(axis, rows, are_even, pieces.pop() if len(pieces) == 1 else None)


def other_than_rows(call: Call, places: Iterable[int]) -> Unknown | None:
    """Returns what rows are together with something that is none and not the same on all ranks; None: there is none such."""
    found = [call.inputs[place] for place in places]
    if any(isinstance(x, Lengths | Places) for x in found):
        return call.unknown(Why.MEET)
    if any(isinstance(x, Partial) for x in found):
        return call.unknown(Why.GOES_BACK if any(isinstance(x, Shard) for x in found) else Why.FUNCTION)
    return None


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


def _row_size(call: Call, places: list[int], axis: int) -> int | None:
    return next((call.shapes[p][axis] for p in places if isinstance(call.inputs[p], Shard)), None)
