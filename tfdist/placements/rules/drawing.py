"""Random numbers, which each rank draws for itself: of its rows, where there are as many as these."""

from tfdist.placements.call import Call
from tfdist.placements.kinds import Placement, Replicate, Shard, Why
from tfdist.placements.rules.meeting import moved, rows_of
from tfdist.placements.rules.views import lengths_of


def drawn(call: Call, shape: int = 0) -> Placement:
    """Of one that draws as many numbers as input number `shape` says."""
    lengths = lengths_of(call, shape)
    others = [place for place in range(len(call.inputs)) if place != shape or lengths is None]
    if call.are_same(*others):
        return Replicate(True) if lengths is None else rows_of(lengths)
    # One whose parameters, the last inputs, are rows: it draws so many for each of them.
    given = call.rows(len(call.inputs) - 1)
    size = call.shapes[shape][0] if call.shapes[shape].rank == 1 else None
    call.need(call.type in ("RandomGamma", "RandomPoissonV2") and call.are_same(shape) and size is not None)
    return moved(given, given.axis + size)


def key(call: Call) -> Placement:
    """Of what the next numbers are drawn by."""
    is_same = call.are_same(*range(len(call.inputs)))
    call.need(is_same or call.type == "RngReadAndSkip")  # which skips as many as it draws
    return Replicate(True)


def classes(call: Call) -> Placement:
    """Of Multinomial: classes drawn for each row."""
    if call.are_same(0):
        return key(call)
    given = call.rows(0)
    call.need(given.axis == 0 and call.are_same(*range(1, len(call.inputs))))
    return given


def shuffled(call: Call) -> Placement:
    given = call.inputs[0]
    if not isinstance(given, Shard):
        return key(call)
    call.need(given.axis > 0)
    return given


def candidates(call: Call) -> list[Placement]:
    """Of a sampler of classes: these, how often the true classes of the rows are expected, and how often these."""
    given = call.inputs[0]
    rows = given if isinstance(given, Replicate | Shard) else call.unknown(Why.MEET)
    return [Replicate(True), rows, Replicate(True)]
