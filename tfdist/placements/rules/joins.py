"""Operations that put tensors together: along an axis, into a new one, or into a list."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Why
from tfdist.placements.rules.meeting import aligned, moved
from tfdist.placements.rules.pointwise import combined
from tfdist.placements.rules.slices import element, taken
from tfdist.placements.rules.views import as_lengths


def pack(call: Call) -> Placement:
    found, axis, rank = call.inputs, call.attribute("axis"), call.results[0].rank
    if any(isinstance(x, Places) for x in found):
        return _beside_places(call, found, axis)
    if any(isinstance(x, Shard) for x in found):
        rows = aligned(call)
        call.need(rank is not None)
        return moved(rows, rows.axis + (axis % rank <= rows.axis))
    if rank == 1 and (lengths := _lengths_among(call, list(range(len(found))))) is not None:
        return lengths
    together = combined(call)
    if rank == 1 and len(found) > 1 and together in (Partial(How.COUNT), Partial(How.SUM)):
        names = [x.rows for x in found if isinstance(x, Partial) and x.how is How.COUNT and len(x.rows) == 1]
        return Partial(How.COUNT, sum(names, ())) if len(names) == len(found) else together
    return together


def concat(call: Call) -> Placement:
    """Of ConcatV2, whose last input is the axis."""
    places, axis, rank = list(range(len(call.inputs) - 1)), call.value(len(call.inputs) - 1), call.results[0].rank
    found = call.inputs[:-1]
    if any(isinstance(x, Places) for x in found):
        return _beside_places(call, found, axis)
    shards = [x for x in found if isinstance(x, Shard)]
    if not shards:
        lengths = _lengths_among(call, places) if rank == 1 else None
        return combined(call, places) if lengths is None else lengths
    call.need(axis is not None and rank is not None)
    if int(axis) % rank != shards[0].axis:
        return aligned(call, places)
    if len(found) == 1:
        return shards[0]
    call.need(len(shards) == len(found))
    call.need(all(x.axis == shards[0].axis and x.rows and x.is_even and x.pieces == 1 for x in shards))
    return Shard(shards[0].axis, sum((x.rows for x in shards), ()))


def _lengths_among(call: Call, places: list[int]) -> Lengths | None:
    """Returns the shape that numbers, one of which is how many rows there are, are together; None: they are none."""
    at, found = 0, None
    for place in places:
        given, size = call.inputs[place], 1 if call.type == "Pack" else call.shapes[place][0] if call.shapes[place].rank else None
        if isinstance(given, Replicate):
            at = None if size is None or at is None else at + size
            continue
        if isinstance(given, Partial):
            lengths = as_lengths(given, 0) if size == 1 and call.dtypes[place].is_integer else None
        else:
            lengths = given if isinstance(given, Lengths) and call.type != "Pack" else None
        if lengths is None or found is not None or at is None:
            return None
        found = dataclasses.replace(lengths, axis=lengths.axis + at)
        at = None if size is None else at + size
    return found


def _beside_places(call: Call, found: Sequence[Placement], axis: np.ndarray | int | None) -> Placement:
    """Returns numbers of rows in the first column, and in others what is of the rows."""
    first = found[0]
    call.need(axis is not None and axis in (1, -1) and call.results[0].rank == 2)
    if not isinstance(first, Places) or not first.are_all:
        return call.unknown(Why.MEET)
    rows = [x for x in found[1:] if isinstance(x, Shard)]
    call.need(len(rows) == len(found) - 1 and all(x.axis == 0 and x.is_even for x in rows))
    call.need(all(x.rows == first.rows or not (x.is_joined or len(first.rows) > 1) for x in rows))
    return first


def stitch(call: Call) -> Placement:
    """Of DynamicStitch: of a shape in which some elements were replaced by numbers that are the same on all ranks."""
    half = len(call.inputs) // 2
    call.need(call.are_same(*range(half)))
    result: Placement = Replicate()
    for place, given in enumerate(call.inputs[half:]):
        numbers = call.value(place)
        call.need(numbers is not None)
        if isinstance(given, Lengths):
            call.need(isinstance(result, Replicate))
            result = dataclasses.replace(given, axis=int(numbers.reshape(-1)[given.axis]))
            continue
        call.need(isinstance(given, Replicate))
        if isinstance(result, Lengths) and result.axis in numbers:
            result = Replicate()
    return result


def concat_offset(call: Call) -> Placement:
    axis = call.value(0)
    call.need(axis is not None)
    call.need(all(isinstance(x, Replicate) or (isinstance(x, Lengths) and x.axis != axis) for x in call.inputs))
    return Replicate()


def broadcast_shape(call: Call) -> Placement:
    """Of BroadcastArgs: the shape of what two tensors make element by element."""
    place = 0 if isinstance(call.inputs[0], Lengths) else 1
    lengths, other, known = call.inputs[place], call.inputs[1 - place], call.value(1 - place)
    sizes = [shape[0] if shape.rank == 1 else None for shape in call.shapes]
    if not isinstance(lengths, Lengths) or None in sizes:
        return call.unknown(Why.MEET)
    at = lengths.axis - sizes[place]  # from the end
    new = dataclasses.replace(lengths, axis=max(sizes) + at)
    if isinstance(other, Lengths):
        call.need(new == dataclasses.replace(other, axis=max(sizes) + other.axis - sizes[1]))
    else:
        call.need(isinstance(other, Replicate) and (sizes[1 - place] < -at or (known is not None and known[at] == 1)))
    return new


def list_with(call: Call) -> Placement:
    """Of a list into which one more tensor, the last input, is put."""
    tensors, given = call.inputs[0], call.inputs[-1]
    call.need(all(isinstance(x, Replicate) for x in call.inputs[1:-1]))
    if isinstance(tensors, Replicate):
        return Partial(given.how) if isinstance(given, Partial) else given
    if isinstance(tensors, Partial) and isinstance(given, Partial | Replicate):
        return combined(call, [0, len(call.inputs) - 1])
    call.need(tensors == given)
    return tensors


def list_item(call: Call) -> Placement:
    call.need(call.are_same(1))
    return call.inputs[0]


def list_stacked(call: Call) -> Placement:
    """Of TensorListStack, and of TensorListGather, whose second input says which."""
    given = call.inputs[0]
    call.need(call.type == "TensorListStack" or call.are_same(1))
    return moved(given, given.axis + 1) if isinstance(given, Shard) else given


def list_joined(call: Call) -> list[Placement]:
    """Of TensorListConcatV2, along axis 0, and the lengths of the parts."""
    given = call.inputs[0]
    call.need(not isinstance(given, Shard) or given.axis > 0)
    return [given, Replicate()]


def list_shape(call: Call) -> Placement:
    call.need(not isinstance(call.inputs[0], Shard), Why.SIZE)
    return Replicate()


def optional(call: Call) -> Placement:
    """Of OptionalFromValue, which holds one tensor, or more."""
    call.need(len(call.inputs) == 1)
    return call.inputs[0]


def gathered_lengths(call: Call, lengths: Lengths) -> Placement:
    """Returns what elements of a shape, whose numbers are the second input, are."""
    numbers = call.value(1)
    call.need(numbers is not None and call.are_same(1) and numbers.ndim <= 1)
    if numbers.ndim:
        return taken(lengths, numbers.tolist(), call)
    return element(lengths) if numbers == lengths.axis else Replicate()
