"""Slices and parts: all rows, or those of one tensor of several that were joined; an element of a shape."""

from __future__ import annotations

import dataclasses

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Unknown, Why
from tfdist.placements.rules.meeting import moved
from tfdist.placements.rules.views import lengths_of, of_numbers


def strided_slice(call: Call) -> Placement:
    given = call.inputs[0]
    if isinstance(given, Lengths):
        return _of_lengths(call, given)
    specs = call.shapes[1][0] if call.shapes[1].rank == 1 else None
    if isinstance(given, Partial) or specs is None:
        return of_numbers(call)
    taken = _taken(call, specs)
    if taken is None or not isinstance(given, Places | Shard):
        return call.unknown(Why.MEET)
    axes, shrunk = taken
    if isinstance(given, Places):
        return _of_places(call, given, axes, shrunk)
    spec, new = axes.get(given.axis, (None, _place_behind(axes, given.axis)))
    if given.axis in shrunk or new is None or not _is_apart(call, spec):
        return call.unknown(Why.MEET)
    if spec is None:
        return moved(given, new)
    rows = _part(call, given, spec)
    return dataclasses.replace(given, axis=new, rows=rows) if rows is not None else call.unknown(Why.MEET)


def _taken(call: Call, specs: int) -> tuple[dict[int, tuple[int | None, int]], dict[int, int]] | None:
    """Returns, by axis of the input, which of `specs` slices it and its axis in the result; of those that vanish, which spec."""
    masks = {name: call.attribute(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis")}
    rank, dots = call.shapes[0].rank, [spec for spec in range(specs) if masks["ellipsis"] >> spec & 1]
    if dots and rank is None:
        return None
    axis = new = 0
    axes: dict[int, tuple[int | None, int]] = {}
    shrunk: dict[int, int] = {}
    for spec in range(specs):
        if masks["ellipsis"] >> spec & 1:
            used = sum(not masks["new_axis"] >> other & 1 for other in range(specs) if other != spec)
            for _ in range(rank - used):
                axes[axis] = (None, new)
                axis, new = axis + 1, new + 1
        elif masks["new_axis"] >> spec & 1:
            new += 1
        elif masks["shrink_axis"] >> spec & 1:
            shrunk[axis] = spec
            axis += 1
        else:
            axes[axis] = (spec, new)
            axis, new = axis + 1, new + 1
    axes[axis] = (None, new)  # and so on
    return axes, shrunk


def _place_behind(axes: dict[int, tuple[int | None, int]], axis: int) -> int | None:
    last = max(axes)
    return axes[last][1] + axis - last if axis > last else None


def _is_apart(call: Call, spec: int | None) -> bool:
    """Whether bounds that depend on the rows, if any, are those of the slice of the rows."""
    return all(
        isinstance(call.inputs[place], Replicate) or (bound := lengths_of(call, place)) is not None and bound.axis == spec
        for place in (1, 2, 3)
    )


def _part(call: Call, given: Shard, spec: int) -> tuple[str, ...] | None:
    """Returns whose rows a slice of all, or of a tensor's among joined ones, takes; None: others."""
    begin, step = call.elements(1), call.elements(3)
    if step is None or step[spec] != 1:
        return None
    start: int | None = 0
    if not call.attribute("begin_mask") >> spec & 1 and not (begin is not None and begin[spec] == 0):
        start = _parts_before(given, lengths_of(call, 1))
    if call.attribute("end_mask") >> spec & 1:
        return given.rows if start == 0 else None if start is None else given.rows[start:] or None
    stop = _parts_before(given, lengths_of(call, 2))
    return None if start is None or stop is None else given.rows[start:stop] or None


def _parts_before(given: Shard, bound: Lengths | None) -> int | None:
    """Returns how many of the joined tensors are before `bound`, the number of rows of these; None: it is no such number."""
    if bound is None or not (bound.rows and given.is_even and given.pieces == 1 == bound.pieces):
        return None
    number = len(bound.rows)
    return number if given.rows[:number] == bound.rows else None


def _of_places(call: Call, given: Places, axes: dict[int, tuple[int | None, int]], shrunk: dict[int, int]) -> Placement:
    whole = axes.get(0, (None, None))
    is_whole = whole[1] == 0 and (whole[0] is None or _part(call, _rows_of(given), whole[0]) == given.rows)
    if not is_whole or not _is_apart(call, whole[0]):
        return call.unknown(Why.MEET)
    if 1 not in shrunk:
        is_column = call.shapes[0].rank == 1 and call.results[0].rank in (1, 2)
        return given if is_column else call.unknown(Why.MEET)
    column = call.value(1)
    if column is None:
        return call.unknown(Why.MEET)
    return given if column[shrunk[1]] == 0 else _rows_of(given) if column[shrunk[1]] > 0 else call.unknown(Why.MEET)


def _rows_of(given: Places) -> Shard:
    return Shard(0, given.rows, given.are_all, given.pieces if given.are_all else None)


def _of_lengths(call: Call, given: Lengths) -> Placement:
    begin, end, step = (call.value(place) for place in (1, 2, 3))
    size = call.shapes[0][0] if call.shapes[0].rank == 1 else None
    if begin is None or end is None or step is None or len(begin) != 1 or size is None:
        return call.unknown(Why.MEET)
    if call.attribute("new_axis_mask") or call.attribute("ellipsis_mask"):
        return call.unknown(Why.MEET)
    if call.attribute("shrink_axis_mask"):
        return element(given) if int(begin[0]) % size == given.axis else Replicate()
    first = None if call.attribute("begin_mask") else int(begin[0])
    last = None if call.attribute("end_mask") else int(end[0])
    return taken(given, list(range(size))[slice(first, last, int(step[0]))], call)


def element(given: Lengths) -> Partial:
    """Returns what the number of rows in a shape is."""
    if not given.is_even:
        return Partial(How.SUM)
    return Partial(How.COUNT, given.rows if given.pieces == 1 else ())


def taken(given: Lengths, places: list[int], call: Call) -> Placement:
    """Returns what elements number `places` of a shape are."""
    at = [new for new, old in enumerate(places) if old == given.axis]
    if len(at) > 1:
        return call.unknown(Why.MEET)
    return dataclasses.replace(given, axis=at[0]) if at else Replicate()


def plain_slice(call: Call) -> Placement:
    """Of Slice, which has a start and a size for each axis, -1 for all that are left."""
    given, begin, size = call.inputs[0], call.elements(1), call.elements(2)
    if isinstance(given, Lengths) and begin is not None and size is not None and None not in (begin[0], size[0]):
        stop = None if size[0] < 0 else begin[0] + size[0]
        return taken(given, list(range(given.axis + 1))[int(begin[0]) : stop], call)
    if not isinstance(given, Shard):
        return of_numbers(call)
    if begin is None or begin[given.axis] != 0 or not isinstance(call.inputs[1], Replicate):
        return call.unknown(Why.MEET)
    if size is not None and size[given.axis] is not None:
        return given if size[given.axis] == -1 else call.unknown(Why.MEET)
    bound = lengths_of(call, 2)
    number = _parts_before(given, bound) if bound is not None and bound.axis == given.axis else None
    return dataclasses.replace(given, rows=given.rows[:number]) if number else call.unknown(Why.MEET)


def split(call: Call) -> Placement | list[Placement]:
    """Of Split, whose first input is the axis, and SplitV, whose last one is."""
    is_even = call.type == "Split"
    given, place = call.inputs[1 if is_even else 0], call.value(0 if is_even else 2)
    rank = call.shapes[1 if is_even else 0].rank
    sizes = Replicate() if is_even else call.inputs[1]
    if isinstance(given, Partial) and isinstance(sizes, Replicate):
        return Partial(given.how)
    if not isinstance(given, Shard) or place is None or (rank is None and place < 0):
        return call.unknown(Why.MEET)
    axis = int(place) % rank if place < 0 else int(place)
    if axis != given.axis:
        return given if isinstance(sizes, Replicate) else call.unknown(Why.MEET)
    return _split_rows(call, given, sizes)


def _split_rows(call: Call, given: Shard, sizes: Placement) -> list[Placement] | Unknown:
    number = len(call.results)
    if number == 1:
        return [given]
    is_by_tensor = isinstance(sizes, Partial) and sizes.rows == given.rows
    is_by_half = call.type == "Split" and len(set(given.rows)) == 1
    if len(given.rows) != number or not given.is_even or given.pieces != 1 or not (is_by_tensor or is_by_half):
        return call.unknown(Why.MEET)
    return [dataclasses.replace(given, rows=(name,)) for name in given.rows]


def slice_gradient(call: Call) -> Placement:
    """Of StridedSliceGrad: a derivative by what was sliced, in zeros of its shape, the first input."""
    given, lengths = call.inputs[4], lengths_of(call, 0)
    if isinstance(given, Partial):
        is_clean = given.how not in (How.MAX, How.MIN) and all(isinstance(x, Replicate) for x in call.inputs[:4])
        return Partial(given.how) if is_clean else call.unknown(Why.FUNCTION)
    begin, end = call.attribute("begin_mask"), call.attribute("end_mask")
    others = call.attribute("ellipsis_mask") | call.attribute("new_axis_mask") | call.attribute("shrink_axis_mask")
    is_first = isinstance(given, Shard) and given.axis == 0 and lengths is not None and lengths.axis == 0
    step = call.value(3)
    is_whole = begin & 1 and end & 1 and not others & 1 and step is not None and step[0] == 1
    return given if is_first and is_whole and all(isinstance(x, Replicate) for x in call.inputs[1:4]) else call.unknown(Why.MEET)
