"""Slices and parts: all rows, or those of one tensor of several that were joined; an element of a shape."""

import dataclasses

from tfdist.placements.call import Call, NotKnown
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Why
from tfdist.placements.rules.meeting import axis_of, linear_in, moved, rows_of
from tfdist.placements.rules.views import lengths_of, of_numbers


def strided_slice(call: Call) -> Placement:
    given = call.inputs[0]
    if isinstance(given, Lengths):
        return _of_lengths(call, given)
    specs = call.shapes[1][0] if call.shapes[1].rank == 1 else None
    if isinstance(given, Partial) or specs is None:
        return of_numbers(call)
    if isinstance(given, Places):
        return _of_places(call, given, *_taken(call, specs, 0))
    given = call.rows(0)
    axes, _ = _taken(call, specs, given.axis)
    spec, new = axes.get(given.axis, (None, None))
    call.need(new is not None and _is_apart(call, spec))
    return moved(given, new) if spec is None else dataclasses.replace(given, axis=new, rows=_part(call, given, spec))


def _taken(call: Call, specs: int, last: int) -> tuple[dict[int, tuple[int | None, int]], dict[int, int]]:
    """Returns, by axis of the input, as far as `last`, which of `specs` slices it and its axis in the result; of those that
    vanish, which spec."""
    dots, added, gone = (call.attribute(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis"))
    call.need(not dots or call.shapes[0].rank is not None)
    axis = new = 0
    axes: dict[int, tuple[int | None, int]] = {}
    shrunk: dict[int, int] = {}
    for spec in range(specs):
        if added >> spec & 1 and not dots >> spec & 1:
            new += 1
        elif gone >> spec & 1 and not dots >> spec & 1:
            shrunk[axis] = spec
            axis += 1
        else:
            is_one = not dots >> spec & 1
            used = sum(not added >> other & 1 for other in range(specs) if other != spec)
            for _ in range(1 if is_one else call.shapes[0].rank - used):
                axes[axis] = (spec if is_one else None, new)
                axis, new = axis + 1, new + 1
    axes |= {axis + further: (None, new + further) for further in range(last + 1)}
    return axes, shrunk


def _is_apart(call: Call, spec: int | None) -> bool:
    """Whether bounds that depend on the rows, if any, are those of the slice of the rows."""
    return all(
        isinstance(call.inputs[place], Replicate) or (bound := lengths_of(call, place)) is not None and bound.axis == spec
        for place in (1, 2, 3)
    )


def _part(call: Call, given: Shard, spec: int) -> tuple[str, ...]:
    """Returns whose rows a slice of all, or of a tensor's among joined ones, takes. Raises NotKnown if it takes others."""
    begin, step = call.elements(1), call.elements(3)
    call.need(step is not None and step[spec] == 1)
    start, stop = 0, len(given.rows)
    if not call.attribute("begin_mask") >> spec & 1 and not (begin is not None and begin[spec] == 0):
        start = _parts_before(call, given, lengths_of(call, 1))
    is_to_the_end = call.attribute("end_mask") >> spec & 1
    if not is_to_the_end:
        stop = _parts_before(call, given, lengths_of(call, 2))
    call.need(start < stop or (is_to_the_end and start == 0))
    return given.rows[start:stop]


def _parts_before(call: Call, given: Shard, bound: Lengths | None) -> int:
    """Returns how many of the joined tensors are before `bound`, their number of rows. Raises NotKnown if it is another."""
    if bound is None:
        raise NotKnown(Why.MEET)
    number = len(bound.rows)
    call.need(number > 0 and given.is_even and given.pieces == 1 == bound.pieces and given.rows[:number] == bound.rows)
    return number


def _of_places(call: Call, given: Places, axes: dict[int, tuple[int | None, int]], shrunk: dict[int, int]) -> Placement:
    spec, new = axes.get(0, (None, None))
    call.need(new == 0 and _is_apart(call, spec))
    call.need(spec is None or _part(call, rows_of(given), spec) == given.rows)
    if 1 not in shrunk:
        call.need(call.shapes[0].rank == 1 and call.results[0].rank in (1, 2))
        return given
    column = call.value(1)
    call.need(column is not None and column[shrunk[1]] >= 0)
    return given if column[shrunk[1]] == 0 else rows_of(given)


def _of_lengths(call: Call, given: Lengths) -> Placement:
    begin, end, step = (call.value(place) for place in (1, 2, 3))
    size = call.shapes[0][0] if call.shapes[0].rank == 1 else None
    call.need(begin is not None and end is not None and step is not None and len(begin) == 1 and size is not None)
    call.need(not (call.attribute("new_axis_mask") or call.attribute("ellipsis_mask")))
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
    call.need(len(at) <= 1)
    return dataclasses.replace(given, axis=at[0]) if at else Replicate()


def plain_slice(call: Call) -> Placement:
    """Of Slice, which has a start and a size for each axis, -1 for all that are left."""
    given, begin, size = call.inputs[0], call.elements(1), call.elements(2)
    if isinstance(given, Lengths) and begin is not None and size is not None and None not in (begin[0], size[0]):
        stop = None if size[0] < 0 else begin[0] + size[0]
        return taken(given, list(range(given.axis + 1))[int(begin[0]) : stop], call)
    if not isinstance(given, Shard):
        return of_numbers(call)
    call.need(begin is not None and begin[given.axis] == 0 and call.are_same(1))
    if size is not None and size[given.axis] is not None:
        call.need(size[given.axis] == -1)
        return given
    bound = lengths_of(call, 2)
    call.need(bound is not None and bound.axis == given.axis)
    return dataclasses.replace(given, rows=given.rows[: _parts_before(call, given, bound)])


def split(call: Call) -> Placement | list[Placement]:
    """Of Split, whose first input is the axis, and SplitV, whose last one is."""
    is_halved = call.type == "Split"
    place, number = 1 if is_halved else 0, call.number
    given, sizes = call.inputs[place], Replicate() if is_halved else call.inputs[1]
    if isinstance(given, Partial) and isinstance(sizes, Replicate):
        return Partial(given.how)
    rows, axis = call.rows(place), axis_of(call.value(0 if is_halved else 2), call.shapes[place].rank)
    call.need(axis is not None and (axis == rows.axis or isinstance(sizes, Replicate)))
    if axis != rows.axis or number == 1:
        return rows
    is_by_tensor = isinstance(sizes, Partial) and sizes.rows == rows.rows
    call.need(is_by_tensor or (is_halved and len(set(rows.rows)) == 1))
    call.need(len(rows.rows) == number and rows.is_even and rows.pieces == 1)
    return [dataclasses.replace(rows, rows=(name,)) for name in rows.rows]


def slice_gradient(call: Call) -> Placement:
    """Of StridedSliceGrad: a derivative by what was sliced, in zeros of its shape, the first input."""
    given, lengths = call.inputs[4], lengths_of(call, 0)
    if isinstance(given, Partial):
        call.need(call.are_same(0, 1, 2, 3), Why.FUNCTION)
        return linear_in(call, given)
    rows, step = call.rows(4), call.value(3)
    begin, end = call.attribute("begin_mask"), call.attribute("end_mask")
    others = call.attribute("ellipsis_mask") | call.attribute("new_axis_mask") | call.attribute("shrink_axis_mask")
    call.need(rows.axis == 0 and lengths is not None and lengths.axis == 0 and call.are_same(1, 2, 3))
    call.need(begin & 1 and end & 1 and not others & 1 and step is not None and step[0] == 1)
    return rows
