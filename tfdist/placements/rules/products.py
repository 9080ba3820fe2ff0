"""Products of tensors: what becomes of rows and of numbers of all rows, told from the letters of their axes."""

from __future__ import annotations

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Partial, Placement, Replicate, Shard, Why
from tfdist.placements.rules.meeting import aligned, merged, moved, other_than_rows, shards_among
from tfdist.placements.rules.pointwise import combined


def einsum(call: Call) -> Placement:
    given, _, result = call.attribute("equation").decode().replace(" ", "").partition("->")
    parts = given.split(",")
    if "..." in given + result:
        found = [_without_dots(part, shape.rank) for part, shape in zip(parts, call.shapes, strict=True)]
        if any(letters is None for letters in found):
            return call.unknown(Why.MEET)
        dots = max((sum(x < "A" for x in letters) for letters in found if letters), default=0)
        return product(call, [letters or "" for letters in found], result.replace("...", _DOTS[len(_DOTS) - dots :]))
    return product(call, parts, result)


def matmul(call: Call) -> Placement:
    """Of MatMul and BatchMatMul: axes before the last two are met as in an operation on each element."""
    ranks = [shape.rank for shape in call.shapes[:2]]
    if None in ranks:
        return call.unknown(Why.MEET)
    is_turned = [_is_turned(call, name) for name in ("a", "b")]
    inner = ["ji" if is_turned[0] else "ij", "kj" if is_turned[1] else "jk"]
    outer = [_DOTS[len(_DOTS) - rank + 2 :] if rank > 2 else "" for rank in ranks]
    return product(call, [one + two for one, two in zip(outer, inner, strict=True)], max(outer, key=len) + "ik")


def product(call: Call, letters: list[str], result: str) -> Placement:
    """Returns what a product of two tensors, or one, makes, whose axes have `letters`, those that `result` lacks summed over."""
    places = range(len(letters))
    shards = shards_among(call, places)
    partials = [x for x in (call.inputs[place] for place in places) if isinstance(x, Partial)]
    if not shards and len(partials) == 1 and all(isinstance(call.inputs[p], Partial | Replicate) for p in places):
        is_linear = partials[0].how not in (How.MAX, How.MIN)
        return Partial(partials[0].how) if is_linear else call.unknown(Why.FUNCTION)
    if (other := other_than_rows(call, places)) is not None:
        return other
    found = {letters[place][shard.axis] for place, shard in shards.items()}
    if len(found) != 1:
        return call.unknown(Why.MEET)
    (letter,) = found
    for place in places:
        at = [axis for axis, x in enumerate(letters[place]) if x == letter]
        if place in shards:
            is_apart = at == [shards[place].axis]
        else:
            is_apart = all(call.shapes[place].rank is not None and call.shapes[place][axis] == 1 for axis in at)
            is_apart = is_apart and (not at or letter in _DOTS)
        if not is_apart:
            return call.unknown(Why.MEET)
    sizes = {call.shapes[place][shard.axis] for place, shard in shards.items() if call.shapes[place].rank is not None}
    together = merged(call, places, 0)
    if len(sizes) > 1 or not isinstance(together, Shard):
        return call.unknown(Why.MEET)
    return moved(together, result.index(letter)) if letter in result else Partial(How.SUM)


def bias_add(call: Call) -> Placement:
    """Of numbers that are added along the axis of channels."""
    given, bias = call.inputs
    if not isinstance(given, Shard) or not isinstance(bias, Replicate):
        both = any(isinstance(x, Shard) for x in call.inputs)
        return aligned(call) if both else combined(call, is_added=True)
    rank = call.shapes[0].rank
    channels = 1 if call.attribute("data_format") == b"NCHW" else None if rank is None else rank - 1
    is_free = given.axis != channels if channels is not None else given.axis == 0
    return given if is_free else call.unknown(Why.MEET)


def filter_gradient(call: Call) -> Placement:
    """Of the gradient by a convolution's filter: rows and derivatives by rows are multiplied and summed."""
    rows = shards_among(call, (0, 2))
    if (other := other_than_rows(call, range(3))) is not None:
        return other
    is_over_rows = len(rows) == 2 and all(shard.axis == 0 for shard in rows.values()) and isinstance(call.inputs[1], Replicate)
    return Partial(How.SUM) if is_over_rows and isinstance(merged(call, rows, 0), Shard) else call.unknown(Why.MEET)


# Letters of axes that a shape has before those that the operation names, the last ones last.
_DOTS = "0123456789"


def _without_dots(part: str, rank: int | None) -> str | None:
    named = part.replace("...", "")
    if rank is None:
        return None
    extra = rank - len(named) if "..." in part else 0
    return part.replace("...", _DOTS[len(_DOTS) - extra :] if extra else "")


def _is_turned(call: Call, name: str) -> bool:
    names = (f"transpose_{name}",) if call.type == "MatMul" else (f"adj_{'xy'['ab'.index(name)]}",)
    return any(call.attribute(one) for one in names)
