"""Sums, means, maxima and the like along axes: over rows they are a rank's part of a number of all rows."""

import numpy as np

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Replicate, Shard, Why
from tfdist.placements.rules.meeting import linear_in, merged, moved, only_rows

_OVER_ROWS = {"Sum": How.SUM, "Mean": How.MEAN, "Max": How.MAX, "Min": How.MIN, "Any": How.MAX, "All": How.MIN}


def reduction(call: Call) -> Placement:
    """Of a reduction of the first input along the axes of the second; or of the place of the greatest or least along one."""
    given, how, is_place = call.inputs[0], _OVER_ROWS.get(call.type), call.type.startswith("Arg")
    call.need(not is_place or (isinstance(given, Shard) and call.shapes[0].rank is not None), Why.FUNCTION)
    call.need(call.are_same(1) and isinstance(given, Lengths | Partial | Shard))
    is_rounded = call.type == "Mean" and call.dtypes[0].is_integer
    if isinstance(given, Partial):
        call.need(how is given.how or call.type in ("Sum", "Mean"), Why.FUNCTION)
        call.need(not is_rounded, Why.FUNCTION)
        return Partial(how) if how is given.how else linear_in(call, given)
    if isinstance(given, Lengths):
        call.need(call.type == "Prod", Why.MIXED)
        return Partial(How.COUNT if given.is_even else How.SUM)
    given, axes = call.rows(0), reduced_axes(call)
    call.need(axes is not None, Why.FUNCTION)
    if given.axis not in axes:
        is_kept = not is_place and call.attribute("keep_dims")
        return moved(given, given.axis - (0 if is_kept else sum(axis < given.axis for axis in axes)))
    call.need(how is not None, Why.MEET if is_place else Why.FUNCTION)
    call.need(not is_rounded, Why.MEET)
    call.need(how is not How.MEAN or given.is_even, Why.SOME_ROWS)
    return Partial(how)


def reduced_axes(call: Call) -> set[int] | None:
    """Returns the axes that the second input names, all where nothing is left, None where they are not known."""
    rank, axes = call.shapes[0].rank, call.value(1)
    if axes is None:
        return set(range(rank or 99)) if call.results[0].rank == 0 else None
    if rank is None:
        return set(axes.reshape(-1).tolist()) if np.all(axes >= 0) else None
    return {int(axis) % rank for axis in axes.reshape(-1)} if rank else set()


def scan(call: Call) -> Placement:
    """Of running sums along an axis: linear, too, but for the logarithm of sums."""
    first, axes = call.inputs[0], reduced_axes(call)
    if isinstance(first, Partial) and call.type == "Cumsum":
        return linear_in(call, first)
    given = call.rows(0, Why.FUNCTION)
    call.need(axes is not None and given.axis not in axes and call.shapes[0].rank is not None)
    return given


def squares(call: Call) -> Placement:
    """Of L2Loss: half of the sum of all squares."""
    call.rows(0, Why.FUNCTION)
    return Partial(How.SUM)


def bias_gradient(call: Call) -> Placement:
    """Of a sum along all axes but that of channels."""
    given, rank = call.rows(0, Why.FUNCTION), call.shapes[0].rank
    call.need(rank is not None, Why.FUNCTION)
    channels = 1 if call.attribute("data_format") == b"NCHW" else rank - 1
    return moved(given, 0) if given.axis == channels else Partial(How.SUM)


def counts(call: Call) -> Placement:
    """Of a count of the numbers in the first input, perhaps weighted."""
    size, weights = call.inputs[1], call.inputs[-1]
    is_counting = call.type in ("Bincount", "DenseBincount")
    has_weights = is_counting and call.shapes[-1].num_elements() != 0
    others = [0, len(call.inputs) - 1] if has_weights else [0]
    only_rows(call, others)
    is_sized = isinstance(size, Replicate) or (is_counting and bool(call.results[0].rank) and call.results[0][-1] is not None)
    call.need(is_sized, Why.SIZE)
    rows = call.rows(0)
    call.need(not has_weights or (isinstance(weights, Shard) and weights.axis == rows.axis))
    together = merged(call, others, rows.axis)
    if call.type != "DenseBincount" or call.shapes[0].rank == 1:
        return Partial(How.MAX if call.type == "DenseBincount" and call.attribute("binary_output") else How.SUM)
    call.need(call.shapes[0].rank == 2 and rows.axis == 0)
    return together
