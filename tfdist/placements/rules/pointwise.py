"""Operations on each element, and, of numbers of all rows, which of them are as good on a rank's part as on the whole."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Unknown, Why
from tfdist.placements.rules.meeting import aligned, is_zero, merged

_OTHER_END = {How.MAX: How.MIN, How.MIN: How.MAX}


def pointwise(call: Call) -> Placement:
    """Of an operation of which nothing is known but that it is one on each element."""
    return aligned(call)


def same(call: Call) -> Placement:
    """Of one that returns its first input."""
    return call.inputs[0]


def way_back(call: Call, place: int) -> Placement:
    """Of the gradient of an operation on each element: linear in input number `place`."""
    given = call.inputs[place]
    others = [x for number, x in enumerate(call.inputs) if number != place]
    if isinstance(given, Partial) and all(isinstance(x, Replicate) for x in others):
        return _scaled(call, given, None)
    return aligned(call)


def alike(call: Call) -> Placement:
    """Of one that returns a constant of the same shape."""
    given = call.inputs[0]
    if isinstance(given, Places):
        return Shard(0, given.rows, given.are_all, given.pieces if given.are_all else None)
    return given if isinstance(given, Shard) else Replicate()


def cast(call: Call) -> Placement:
    given, (old,), (new,) = call.inputs[0], call.dtypes, [call.attribute("DstT")]
    if isinstance(given, Partial):
        if new.is_bool or not given.rows and given.how not in _OTHER_END and (new.is_integer and not old.is_integer):
            return given if new == old else call.unknown(Why.FUNCTION)
        if old.is_bool and given.is_sum:
            return call.unknown(Why.FUNCTION)
    if isinstance(given, Lengths | Places) and new.is_bool:
        return call.unknown(Why.FUNCTION)
    return given


def linear(call: Call) -> Placement:
    """Of a linear function of each element alone."""
    given = call.inputs[0]
    if isinstance(given, Partial):
        return dataclasses.replace(given, rows=()) if given.how not in _OTHER_END else call.unknown(Why.FUNCTION)
    return aligned(call)


def negative(call: Call) -> Placement:
    given = call.inputs[0]
    return Partial(_OTHER_END.get(given.how, given.how)) if isinstance(given, Partial) else aligned(call)


def add(call: Call) -> Placement:
    """Of sums and differences."""
    if any(isinstance(x, Shard) for x in call.inputs):
        return aligned(call)
    if len(call.inputs) == 2 and any(isinstance(x, Lengths) for x in call.inputs):
        return _changed_lengths(call, 0, both=call.type != "Sub")
    return combined(call, is_added=True)


def combined(call: Call, places: list[int] | None = None, *, is_added: bool = False) -> Placement:
    """Returns what numbers of all rows and the same numbers on all ranks make, added, or one beside the other."""
    places = list(range(len(call.inputs))) if places is None else places
    found = [call.inputs[place] for place in places]
    if not all(isinstance(x, Partial | Replicate) for x in found):
        return call.unknown(Why.MEET if any(isinstance(x, Places | Shard) for x in found) else Why.FUNCTION)
    partials = [x for x in found if isinstance(x, Partial)]
    others = [place for place in places if isinstance(call.inputs[place], Replicate)]
    if not partials:
        return Replicate(any(x.is_drawn for x in found if isinstance(x, Replicate)))
    hows = {x.how for x in partials}
    if len(hows) == 1 and not partials[0].is_sum:
        (how,) = hows
        if how is How.MEAN or not is_added:
            return Partial(how)
        is_turned = call.type == "Sub" and isinstance(found[0], Replicate)
        return Partial(_OTHER_END[how] if is_turned else how) if len(partials) == 1 else call.unknown(Why.FUNCTION)
    if not all(x.is_sum for x in partials):
        return call.unknown(Why.FUNCTION if hows & set(_OTHER_END) else Why.MIXED)
    if not all(is_zero(call, place) for place in others):
        return call.unknown(Why.MIXED)
    is_one_count = hows == {How.COUNT} and len({x.rows for x in partials}) == 1
    return Partial(How.COUNT) if is_one_count else Partial(How.SHARE) if hows == {How.SHARE} else Partial(How.SUM)


def multiply(call: Call) -> Placement:
    first, second = call.inputs
    if any(isinstance(x, Lengths) for x in call.inputs):
        return _changed_lengths(call, 1, both=True)
    for place, (one, other) in enumerate([(first, second), (second, first)]):
        if isinstance(one, Partial) and isinstance(other, Replicate):
            return _scaled(call, one, call.value(1 - place))
        if isinstance(one, Partial) and isinstance(other, Partial) and one.how is How.MEAN:
            return Partial(How.SUM) if other.how in (How.COUNT, How.SHARE) else call.unknown(Why.FUNCTION)
    return aligned(call)


def divide(call: Call) -> Placement:
    """Of a quotient; of integers it is no linear one."""
    first, second = call.inputs
    if isinstance(second, Partial) and second.how is How.REPLICAS:
        return Partial(How.SUM) if isinstance(first, Replicate) and not call.dtypes[0].is_integer else call.unknown(Why.FUNCTION)
    if isinstance(first, Partial) and not call.dtypes[0].is_integer:
        if isinstance(second, Replicate):
            return _scaled(call, first, call.value(1))
        if first.is_sum and isinstance(second, Partial) and second.how in (How.COUNT, How.SHARE):
            return Partial(How.MEAN if first.how is How.SUM else How.ALIKE)
    return aligned(call)


def divide_integers(call: Call) -> Placement:
    return _changed_lengths(call, 1, both=False) if isinstance(call.inputs[0], Lengths) else aligned(call)


def greatest(call: Call) -> Placement:
    """Of Maximum, and of LogicalOr."""
    return _extreme(call, How.MAX)


def least(call: Call) -> Placement:
    """Of Minimum, and of LogicalAnd."""
    return _extreme(call, How.MIN)


def compared(call: Call) -> Placement:
    """Of Greater, Equal, NotEqual: whether there are rows at all is known of all ranks where one has some."""
    first, second = call.inputs
    if isinstance(first, Partial) and first.how is How.COUNT and isinstance(second, Replicate) and is_zero(call, 1):
        return Partial(How.MIN if call.type == "Equal" else How.MAX)
    return aligned(call)


def select(call: Call) -> Placement:
    """Of a choice between the second and the third input by the first."""
    condition = call.inputs[0]
    if call.type == "Select" and call.shapes[0].rank == 1 and call.shapes[1].rank != 1:  # one condition for each first index
        found = [x for x in call.inputs[1:] if isinstance(x, Shard)]
        if isinstance(condition, Shard) != any(x.axis == 0 for x in found) or call.shapes[1].rank is None:
            return call.unknown(Why.MEET)
        if isinstance(condition, Shard):
            return aligned(call, [1, 2]) if len(found) == 2 and merged(call, [0, 1, 2], 0) == found[0] else call.unknown(Why.MEET)
        return aligned(call, [1, 2]) if found else combined(call, [1, 2])
    if isinstance(condition, Replicate) and not any(isinstance(x, Shard) for x in call.inputs):
        return combined(call, [1, 2])
    return aligned(call)


def _extreme(call: Call, how: How) -> Placement:
    found = [x for x in call.inputs if not isinstance(x, Replicate)]
    if all(isinstance(x, Partial) and x.how is how for x in found):
        return Partial(how)
    return aligned(call)


def _scaled(call: Call, partial: Partial, factor: np.ndarray | None) -> Partial | Unknown:
    if partial.how not in _OTHER_END:
        return Partial(partial.how)
    if factor is not None and (np.all(factor > 0) or np.all(factor < 0)) and factor.size:
        return Partial(partial.how if np.all(factor > 0) else _OTHER_END[partial.how])
    return call.unknown(Why.FUNCTION)


def _changed_lengths(call: Call, neutral: int, *, both: bool) -> Placement:
    """Of a shape and numbers that are the same on all ranks, and leave the number of rows as it is."""
    for place in (0, 1) if both else (0,):
        lengths, other = call.inputs[place], call.value(1 - place)
        if isinstance(lengths, Lengths) and isinstance(call.inputs[1 - place], Replicate) and other is not None:
            by = other.reshape(-1)[lengths.axis if other.size > 1 else 0] if other.size else None
            if other.ndim <= 1 and by == neutral:
                return lengths
    return call.unknown(Why.FUNCTION)


def shape_of(call: Call) -> list[Placement]:
    """Of Shape and ShapeN."""
    return [_shape(x) for x in call.inputs]


def size_of(call: Call) -> Placement:
    given = call.inputs[0]
    if isinstance(given, Places):
        return Partial(How.COUNT, given.rows) if _is_one(given) and call.shapes[0].rank == 1 else Partial(How.SUM)
    if not isinstance(given, Shard):
        return Replicate()
    is_vector = call.shapes[0].rank == 1 and given.pieces == 1
    return Partial(How.COUNT, given.rows if is_vector else ()) if given.is_even else Partial(How.SUM)


def _is_one(places: Places) -> bool:
    return places.are_all and places.pieces == 1


def _shape(given: Placement) -> Placement:
    if isinstance(given, Shard):
        return Lengths(given.axis, given.rows, given.is_even, given.pieces)
    if isinstance(given, Places):
        return Lengths(0, given.rows, given.are_all, given.pieces if given.are_all else None)
    return Replicate()
