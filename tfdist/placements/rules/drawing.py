"""Random numbers, which each rank draws for itself: of its rows, where there are as many as these."""

from __future__ import annotations

import dataclasses

from tfdist.placements.call import Call
from tfdist.placements.kinds import Placement, Replicate, Shard, Why
from tfdist.placements.rules.views import lengths_of


def drawn(call: Call, shape: int = 0) -> Placement:
    """Of one that draws as many numbers as input number `shape` says."""
    lengths = lengths_of(call, shape)
    others = [x for place, x in enumerate(call.inputs) if place != shape or lengths is None]
    if not all(isinstance(x, Replicate) for x in others):
        return _by_rows(call, shape)
    return Replicate(True) if lengths is None else Shard(lengths.axis, lengths.rows, lengths.is_even, lengths.pieces)


def _by_rows(call: Call, shape: int) -> Placement:
    """Of one whose parameters, the last inputs, are rows: it draws so many for each of them."""
    given, size = call.inputs[-1], call.shapes[shape][0] if call.shapes[shape].rank == 1 else None
    is_of_each = (
        call.type in ("RandomGamma", "RandomPoissonV2") and isinstance(given, Shard) and isinstance(call.inputs[shape], Replicate)
    )
    if is_of_each and size is not None and isinstance(given, Shard):
        return dataclasses.replace(given, axis=given.axis + size)
    return call.unknown(Why.MEET)


def key(call: Call) -> Placement:
    """Of what the next numbers are drawn by."""
    is_same = call.type == "RngReadAndSkip" or all(isinstance(x, Replicate) for x in call.inputs)  # skips as many as it draws
    return Replicate(True) if is_same else call.unknown(Why.MEET)


def classes(call: Call) -> Placement:
    """Of Multinomial: classes drawn for each row."""
    given = call.inputs[0]
    if isinstance(given, Replicate):
        return key(call)
    is_row = isinstance(given, Shard) and given.axis == 0 and all(isinstance(x, Replicate) for x in call.inputs[1:])
    return given if is_row else call.unknown(Why.MEET)


def shuffled(call: Call) -> Placement:
    given = call.inputs[0]
    if isinstance(given, Shard):
        return given if given.axis else call.unknown(Why.MEET)
    return key(call)


def candidates(call: Call) -> list[Placement]:
    """Of a sampler of classes: these, how often the true classes of the rows are expected, and how often these."""
    given = call.inputs[0]
    rows = given if isinstance(given, Replicate | Shard) else call.unknown(Why.MEET)
    return [Replicate(True), rows, Replicate(True)]
