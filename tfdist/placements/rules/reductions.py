"""Sums, means, maxima and the like along axes: over rows they are a rank's part of a number of all rows."""

from __future__ import annotations

import numpy as np

from tfdist.placements.call import Call
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Replicate, Shard, Why
from tfdist.placements.rules.meeting import merged, moved, other_than_rows

_OVER_ROWS = {"Sum": How.SUM, "Max": How.MAX, "Min": How.MIN, "Any": How.MAX, "All": How.MIN}


def reduction(call: Call) -> Placement:
    """Of a reduction of the first input along the axes of the second."""
    given = call.inputs[0]
    if not isinstance(call.inputs[1], Replicate) or not isinstance(given, Lengths | Partial | Shard):
        return call.unknown(Why.MEET)
    if isinstance(given, Partial):
        is_linear = call.type in ("Sum", "Mean") and given.how not in (How.MAX, How.MIN)
        is_extreme = _OVER_ROWS.get(call.type) is given.how is not How.SUM
        return Partial(given.how) if is_linear or is_extreme else call.unknown(Why.FUNCTION)
    if isinstance(given, Lengths):
        return Partial(How.COUNT if given.is_even else How.SUM) if call.type == "Prod" else call.unknown(Why.MIXED)
    axes = reduced_axes(call)
    if axes is None:
        return call.unknown(Why.FUNCTION)
    if given.axis not in axes:
        is_kept = call.attribute("keep_dims")
        return moved(given, given.axis - (0 if is_kept else sum(axis < given.axis for axis in axes)))
    if call.type == "Mean":
        return Partial(How.MEAN) if given.is_even else call.unknown(Why.SOME_ROWS)
    how = _OVER_ROWS.get(call.type)
    return call.unknown(Why.FUNCTION) if how is None else Partial(how)


def reduced_axes(call: Call) -> set[int] | None:
    """Returns the axes that the second input names, all where nothing is left, None where they are not known."""
    rank, axes = call.shapes[0].rank, call.value(1)
    if axes is None:
        return set(range(rank or 99)) if call.results[0].rank == 0 else None
    if rank is None:
        return set(axes.reshape(-1).tolist()) if np.all(axes >= 0) else None
    return {int(axis) % rank for axis in axes.reshape(-1)} if rank else set()


def arg_reduction(call: Call) -> Placement:
    """Of the place of the greatest or least along an axis."""
    given, axes = call.inputs[0], reduced_axes(call)
    if not isinstance(given, Shard) or axes is None or call.shapes[0].rank is None:
        return call.unknown(Why.FUNCTION)
    (axis,) = axes
    return call.unknown(Why.MEET) if axis == given.axis else moved(given, given.axis - (axis < given.axis))


def scan(call: Call) -> Placement:
    """Of running sums along an axis: linear, too, but for the logarithm of sums."""
    given, axes = call.inputs[0], reduced_axes(call)
    if isinstance(given, Partial) and call.type == "Cumsum" and given.how not in (How.MAX, How.MIN):
        return Partial(given.how)
    is_along_others = isinstance(given, Shard) and axes is not None and given.axis not in axes and call.shapes[0].rank is not None
    return given if is_along_others else call.unknown(Why.MEET if isinstance(given, Shard) else Why.FUNCTION)


def squares(call: Call) -> Placement:
    """Of L2Loss: half of the sum of all squares."""
    return Partial(How.SUM) if isinstance(call.inputs[0], Shard) else call.unknown(Why.FUNCTION)


def bias_gradient(call: Call) -> Placement:
    """Of a sum along all axes but that of channels."""
    given, rank = call.inputs[0], call.shapes[0].rank
    if not isinstance(given, Shard) or rank is None:
        return call.unknown(Why.FUNCTION)
    channels = 1 if call.attribute("data_format") == b"NCHW" else rank - 1
    return moved(given, 0) if given.axis == channels else Partial(How.SUM)


def counts(call: Call) -> Placement:
    """Of a count of the numbers in the first input, perhaps weighted."""
    rows, size, weights = call.inputs[0], call.inputs[1], call.inputs[-1]
    is_counting = call.type in ("Bincount", "DenseBincount")
    has_weights = is_counting and call.shapes[-1].num_elements() != 0
    others = [0, len(call.inputs) - 1] if has_weights else [0]
    is_sized = isinstance(size, Replicate) or (is_counting and bool(call.results[0].rank) and call.results[0][-1] is not None)
    if (other := other_than_rows(call, others)) is not None or not is_sized:
        return other or call.unknown(Why.SIZE)
    if not isinstance(rows, Shard) or (has_weights and not (isinstance(weights, Shard) and weights.axis == rows.axis)):
        return call.unknown(Why.MEET)
    together = merged(call, others, rows.axis)
    if call.type != "DenseBincount" or call.shapes[0].rank == 1 or not isinstance(together, Shard):
        is_any = call.type == "DenseBincount" and call.attribute("binary_output")
        return Partial(How.MAX if is_any else How.SUM) if isinstance(together, Shard) else together
    return together if call.shapes[0].rank == 2 and rows.axis == 0 else call.unknown(Why.MEET)
