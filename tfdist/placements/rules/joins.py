"""Operations that put tensors together: along an axis, into a new one, or into a list."""

from __future__ import annotations

import dataclasses

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Why
from tfdist.placements.rules.meeting import aligned, moved
from tfdist.placements.rules.pointwise import combined
from tfdist.placements.rules.slices import element, taken
from tfdist.placements.rules.views import as_lengths


def pack(call: Call) -> Placement:
    found, axis, rank = call.inputs, call.attribute("axis"), call.results[0].rank
    if any(isinstance(x, Places) for x in found):
        return _beside_places(call, list(range(len(found)))) if axis in (1, -1) and rank == 2 else call.unknown(Why.MEET)
    if any(isinstance(x, Shard) for x in found):
        rows = aligned(call)
        if not isinstance(rows, Shard) or rank is None:
            return call.unknown(Why.MEET) if isinstance(rows, Shard) else rows
        return moved(rows, rows.axis + (axis % rank <= rows.axis))
    if rank == 1 and (lengths := _lengths_among(call, list(range(len(found))))) is not None:
        return lengths
    together = combined(call)
    if together == Partial(How.COUNT) or together == Partial(How.SUM):
        names = [x.rows for x in found if isinstance(x, Partial) and x.how is How.COUNT and len(x.rows) == 1]
        return Partial(How.COUNT, sum(names, ())) if rank == 1 and len(names) == len(found) > 1 else together
    return together


def concat(call: Call) -> Placement:
    """Of ConcatV2, whose last input is the axis."""
    places, axis, rank = list(range(len(call.inputs) - 1)), call.value(len(call.inputs) - 1), call.results[0].rank
    found = [call.inputs[place] for place in places]
    shards = [x for x in found if isinstance(x, Shard)]
    if any(isinstance(x, Places) for x in found):
        return _beside_places(call, places) if axis is not None and axis in (1, -1) and rank == 2 else call.unknown(Why.MEET)
    if not shards:
        lengths = _lengths_among(call, places) if rank == 1 else None
        return combined(call, places) if lengths is None else lengths
    if axis is None or rank is None:
        return call.unknown(Why.MEET)
    if int(axis) % rank != shards[0].axis:
        return aligned(call, places)
    is_joinable = all(isinstance(x, Shard) and x.axis == shards[0].axis and x.rows for x in found)
    if len(found) > 1 and not (is_joinable and all(x.is_even and x.pieces == 1 for x in shards)):
        return call.unknown(Why.MEET)
    return Shard(shards[0].axis, sum((x.rows for x in shards), ())) if len(found) > 1 else shards[0]


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


def _beside_places(call: Call, places: list[int]) -> Placement:
    """Returns numbers of rows in the first column, and in others what is of the rows."""
    first, others = call.inputs[places[0]], [call.inputs[place] for place in places[1:]]
    if not isinstance(first, Places) or not all(isinstance(x, Shard | Places) for x in others) or not first.are_all:
        return call.unknown(Why.MEET)
    alike = all(
        isinstance(x, Shard) and x.axis == 0 and x.is_even and (x.rows == first.rows or not (x.is_joined or len(first.rows) > 1))
        for x in others
    )
    return first if alike else call.unknown(Why.MEET)


def stitch(call: Call) -> Placement:
    """Of DynamicStitch: of a shape in which some elements were replaced by numbers that are the same on all ranks."""
    half = len(call.inputs) // 2
    result: Placement = Replicate()
    for place in range(half):
        numbers, given = call.value(place), call.inputs[half + place]
        if numbers is None or not isinstance(call.inputs[place], Replicate):
            return call.unknown(Why.MEET)
        if isinstance(given, Lengths):
            if not isinstance(result, Replicate):
                return call.unknown(Why.MEET)
            result = dataclasses.replace(given, axis=int(numbers.reshape(-1)[given.axis]))
        elif not isinstance(given, Replicate):
            return call.unknown(Why.MEET)
        elif isinstance(result, Lengths) and result.axis in numbers:
            result = Replicate()
    return result


def concat_offset(call: Call) -> Placement:
    axis = call.value(0)
    is_apart = axis is not None and all(
        isinstance(x, Replicate) or (isinstance(x, Lengths) and x.axis != axis) for x in call.inputs
    )
    return Replicate() if is_apart else call.unknown(Why.MEET)


def broadcast_shape(call: Call) -> Placement:
    """Of BroadcastArgs: the shape of what two tensors make element by element."""
    lengths, other = call.inputs if isinstance(call.inputs[0], Lengths) else call.inputs[::-1]
    known = call.value(1 if lengths is call.inputs[0] else 0)
    ranks = [shape[0] for shape in call.shapes if shape.rank == 1]
    if not isinstance(lengths, Lengths) or len(ranks) != 2 or None in ranks:
        return call.unknown(Why.MEET)
    own = call.shapes[0 if lengths is call.inputs[0] else 1][0]
    at = lengths.axis - own  # from the end
    new = dataclasses.replace(lengths, axis=max(ranks) + at)
    if isinstance(other, Lengths):
        is_same = new == dataclasses.replace(other, axis=max(ranks) + other.axis - call.shapes[1][0])
        return new if is_same else call.unknown(Why.MEET)
    is_short = isinstance(other, Replicate) and (sum(ranks) - own < -at or (known is not None and known[at] == 1))
    return new if is_short else call.unknown(Why.MEET)


def fresh_list(call: Call) -> Placement:
    """Of a list of tensors in which there is none yet."""
    is_sized = all(isinstance(x, Replicate) for x in call.inputs[1:])
    return Replicate() if is_sized else call.unknown(Why.MEET)


def list_of_parts(call: Call) -> Placement:
    """Of TensorListFromTensor, which cuts along axis 0."""
    given = call.inputs[0]
    if isinstance(given, Shard):
        return moved(given, given.axis - 1) if given.axis else call.unknown(Why.MEET)
    return Partial(given.how) if isinstance(given, Partial) else call.unknown(Why.MEET)


def list_with(call: Call) -> Placement:
    """Of a list into which one more tensor, the last input, is put."""
    tensors, given = call.inputs[0], call.inputs[-1]
    if not all(isinstance(x, Replicate) for x in call.inputs[1:-1]):
        return call.unknown(Why.MEET)
    if isinstance(tensors, Replicate):
        return Partial(given.how) if isinstance(given, Partial) else given
    if isinstance(tensors, Partial) and isinstance(given, Partial | Replicate):
        return combined(call, [0, len(call.inputs) - 1])
    return tensors if tensors == given else call.unknown(Why.MEET)


def list_item(call: Call) -> Placement:
    is_chosen = isinstance(call.inputs[1], Replicate)
    return call.inputs[0] if is_chosen else call.unknown(Why.MEET)


def list_popped(call: Call) -> Placement:
    return call.inputs[0]


def list_stacked(call: Call) -> Placement:
    given = call.inputs[0]
    return moved(given, given.axis + 1) if isinstance(given, Shard) else given


def list_gathered(call: Call) -> Placement:
    return list_stacked(call) if isinstance(call.inputs[1], Replicate) else call.unknown(Why.MEET)


def list_joined(call: Call) -> Placement | list[Placement]:
    """Of TensorListConcatV2, along axis 0, and the lengths of the parts."""
    given = call.inputs[0]
    is_rows = isinstance(given, Shard) and given.axis == 0
    return [call.unknown(Why.MEET), call.unknown(Why.MEET)] if is_rows else [given, Replicate()]


def list_length(call: Call) -> Placement:
    return Replicate()


def list_shape(call: Call) -> Placement:
    return call.unknown(Why.SIZE) if isinstance(call.inputs[0], Shard) else Replicate()


def optional(call: Call) -> Placement:
    """Of OptionalFromValue, which holds one tensor, or more."""
    return call.inputs[0] if len(call.inputs) == 1 else call.unknown(Why.MEET)


def gathered_lengths(call: Call, lengths: Lengths) -> Placement:
    """Returns what elements of a shape, whose numbers are the second input, are."""
    numbers = call.value(1)
    if numbers is None or not isinstance(call.inputs[1], Replicate) or numbers.ndim > 1:
        return call.unknown(Why.MEET)
    return (
        taken(lengths, numbers.tolist(), call) if numbers.ndim else element(lengths) if numbers == lengths.axis else Replicate()
    )
