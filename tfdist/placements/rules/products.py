"""Products of tensors: what becomes of rows and of numbers of all rows, found by the letters of their axes."""

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Partial, Placement, Replicate, Shard
from tfdist.placements.rules.meeting import aligned, linear_in, merged, moved, only_rows, shards_among
from tfdist.placements.rules.pointwise import combined


def einsum(call: Call) -> Placement:
    given, _, result = call.attribute("equation").decode().replace(" ", "").partition("->")
    parts = given.split(",")
    if "..." in given + result:
        call.need(all(shape.rank is not None for shape in call.shapes))
        parts = [_without_dots(part, shape.rank) for part, shape in zip(parts, call.shapes, strict=True)]
        dots = max(sum(x < "A" for x in letters) for letters in parts)
        result = result.replace("...", _DOTS[len(_DOTS) - dots :])
    return product(call, parts, result)


def matmul(call: Call) -> Placement:
    """Of MatMul and BatchMatMul: axes before the last two are met as in an operation on each element."""
    ranks = [shape.rank for shape in call.shapes[:2]]
    call.need(None not in ranks)
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
        return linear_in(call, partials[0])
    only_rows(call, places)
    found = {letters[place][shard.axis] for place, shard in shards.items()}
    call.need(len(found) == 1)
    (letter,) = found
    for place in places:
        at = [axis for axis, x in enumerate(letters[place]) if x == letter]
        if place in shards:
            is_apart = at == [shards[place].axis]
        else:
            is_apart = all(call.shapes[place].rank is not None and call.shapes[place][axis] == 1 for axis in at)
            is_apart = is_apart and (not at or letter in _DOTS)
        call.need(is_apart)
    sizes = {call.shapes[place][shard.axis] for place, shard in shards.items() if call.shapes[place].rank is not None}
    together = merged(call, places, 0)
    call.need(len(sizes) <= 1)
    return moved(together, result.index(letter)) if letter in result else Partial(How.SUM)


def bias_add(call: Call) -> Placement:
    """Of numbers that are added along the axis of channels."""
    given, bias = call.inputs
    if not isinstance(given, Shard) or not isinstance(bias, Replicate):
        both = any(isinstance(x, Shard) for x in call.inputs)
        return aligned(call) if both else combined(call, is_added=True)
    rank = call.shapes[0].rank
    channels = 1 if call.attribute("data_format") == b"NCHW" else None if rank is None else rank - 1
    call.need(given.axis != channels if channels is not None else given.axis == 0)
    return given


def filter_gradient(call: Call) -> Placement:
    """Of the gradient by a convolution's filter: rows and derivatives by rows are multiplied and summed."""
    only_rows(call, range(3))
    call.need(call.rows(0).axis == call.rows(2).axis == 0 and call.are_same(1))
    merged(call, (0, 2), 0)
    return Partial(How.SUM)


# Letters of axes that a shape has before those that the operation names, the last ones last.
_DOTS = "0123456789"


def _without_dots(part: str, rank: int) -> str:
    return part.replace("...", _DOTS[len(_DOTS) - rank + len(part.replace("...", "")) :])


def _is_turned(call: Call, name: str) -> bool:
    return call.attribute(f"transpose_{name}" if call.type == "MatMul" else f"adj_{'xy'['ab'.index(name)]}")
