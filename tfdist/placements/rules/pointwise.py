"""Operations on each element, and, of numbers of all rows, which of them are as good on a rank's part as on the whole."""

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Places, Replicate, Shard, Why
from tfdist.placements.rules.meeting import OTHER_END, aligned, is_zero, linear_in, merged, rows_of


def same(call: Call) -> Placement:
    """Of one that returns its first input."""
    return call.inputs[0]


def linear(call: Call, place: int = 0, factor: float | None = None) -> Placement:
    """Of a function of each element that is linear in input number `place`: `factor` times that, if it is known."""
    given, others = call.inputs[place], [x for number, x in enumerate(call.inputs) if number != place]
    if isinstance(given, Partial) and all(isinstance(x, Replicate) for x in others):
        return linear_in(call, given, factor)
    return aligned(call)


def alike(call: Call) -> Placement:
    """Of one that returns a constant of the same shape."""
    given = call.inputs[0]
    return rows_of(given) if isinstance(given, Places | Shard) else Replicate()


def cast(call: Call) -> Placement:
    given, (old,), (new,) = call.inputs[0], call.dtypes, [call.attribute("DstT")]
    is_cut = new.is_bool
    if isinstance(given, Partial):
        is_rounded = new.is_integer and not old.is_integer and not given.rows and given.how not in OTHER_END
        is_cut = (new != old and (new.is_bool or is_rounded)) or (old.is_bool and given.is_sum)
    call.need(not (is_cut and isinstance(given, Lengths | Partial | Places)), Why.FUNCTION)
    return given


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
    has_rows = any(isinstance(x, Places | Shard) for x in found)
    call.need(all(isinstance(x, Partial | Replicate) for x in found), Why.MEET if has_rows else Why.FUNCTION)
    partials = [x for x in found if isinstance(x, Partial)]
    others = [place for place in places if isinstance(call.inputs[place], Replicate)]
    if not partials:
        return Replicate(any(x.is_drawn for x in found if isinstance(x, Replicate)))
    hows = {x.how for x in partials}
    if len(hows) == 1 and not partials[0].is_sum:
        (how,) = hows
        if how is How.MEAN or not is_added:
            return Partial(how)
        call.need(len(partials) == 1, Why.FUNCTION)
        return Partial(OTHER_END[how] if call.type == "Sub" and isinstance(found[0], Replicate) else how)
    are_sums = all(x.is_sum for x in partials)
    call.need(are_sums or not hows & set(OTHER_END), Why.FUNCTION)
    call.need(are_sums and all(is_zero(call, place) for place in others), Why.MIXED)
    is_one_count = hows == {How.COUNT} and len({x.rows for x in partials}) == 1
    return Partial(How.COUNT) if is_one_count else Partial(How.SHARE) if hows == {How.SHARE} else Partial(How.SUM)


def multiply(call: Call) -> Placement:
    if any(isinstance(x, Lengths) for x in call.inputs):
        return _changed_lengths(call, 1, both=True)
    for place, one in enumerate(call.inputs):
        other = call.inputs[1 - place]
        if isinstance(one, Partial) and isinstance(other, Replicate):
            return linear_in(call, one, call.value(1 - place))
        if isinstance(one, Partial) and isinstance(other, Partial) and one.how is How.MEAN:
            call.need(other.how in (How.COUNT, How.SHARE), Why.FUNCTION)
            return Partial(How.SUM)
    return aligned(call)


def divide(call: Call) -> Placement:
    """Of a quotient; of integers it is no linear one."""
    first, second = call.inputs
    is_exact = not call.dtypes[0].is_integer
    if isinstance(second, Partial) and second.how is How.REPLICAS:
        call.need(isinstance(first, Replicate) and is_exact, Why.FUNCTION)
        return Partial(How.SUM)
    if isinstance(first, Partial) and isinstance(second, Replicate) and is_exact:
        return linear_in(call, first, call.value(1))
    is_by_count = isinstance(second, Partial) and second.how in (How.COUNT, How.SHARE)
    if isinstance(first, Partial) and first.is_sum and is_exact and is_by_count:
        return Partial(How.MEAN if first.how is How.SUM else How.ALIKE)
    return aligned(call)


def divide_integers(call: Call) -> Placement:
    return _changed_lengths(call, 1, both=False) if isinstance(call.inputs[0], Lengths) else aligned(call)


def extreme(call: Call, how: How) -> Placement:
    """Of Maximum and Minimum, and of LogicalOr and LogicalAnd."""
    is_of_extremes = all(isinstance(x, Replicate) or x == Partial(how) for x in call.inputs)
    return Partial(how) if is_of_extremes else aligned(call)


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
        is_by_row = isinstance(condition, Shard)
        call.need(is_by_row == any(x.axis == 0 for x in found) and call.shapes[1].rank is not None)
        call.need(not is_by_row or (len(found) == 2 and merged(call, [0, 1, 2], 0) == found[0]))
        return aligned(call, [1, 2]) if found else combined(call, [1, 2])
    if isinstance(condition, Replicate) and not any(isinstance(x, Shard) for x in call.inputs):
        return combined(call, [1, 2])
    return aligned(call)


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
    return [Lengths(**vars(rows_of(x))) if isinstance(x, Places | Shard) else Replicate() for x in call.inputs]


def size_of(call: Call) -> Placement:
    given = call.inputs[0]
    if not isinstance(given, Places | Shard):
        return Replicate()
    rows, is_vector = rows_of(given), call.shapes[0].rank == 1
    if not rows.is_even or (isinstance(given, Places) and not (is_vector and rows.pieces == 1)):
        return Partial(How.SUM)
    return Partial(How.COUNT, rows.rows if is_vector and rows.pieces == 1 else ())
