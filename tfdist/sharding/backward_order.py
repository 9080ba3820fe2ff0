"""In which order the backward pass gathers parameters again and reduces their gradients. Pure: operations are numbers.

An operation's number is its place in the graph, a topological order. A regather must come before the first operation that
reads it, a reduce-scatter after the last gradient it sends. Sorting both by these numbers gives one order for the rank's chain of
collectives that no data dependency contradicts, whatever order the tape called the gradient functions in.

With `prefetch` = 1 and layers 3, 2, 1, 0 on the way back (3 was gathered last, and kept):

    gather 2 · reduce-scatter 3 · gather 1 · reduce-scatter 2 · gather 0 · reduce-scatter 1 · reduce-scatter 0
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Regather:
    """A unit whose full parameters are read in backward.

    Attributes:
        unit: the unit's number.
        uses: the operations that read it.
        is_kept: its forward gather is still there; it takes a place among the gathered units but no message.
    """

    unit: int
    uses: tuple[int, ...]
    is_kept: bool = False


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A unit whose gradients are complete once operation `ready` has run."""

    unit: int
    ready: int


@dataclasses.dataclass(frozen=True)
class Step:
    """One collective of the backward pass.

    Attributes:
        action: the `Regather` or `Reduction`.
        gate: operations that must have run before a regather may start, so that at most `prefetch + 1` units are gathered
            at once; None: the start of the backward pass.
    """

    action: Regather | Reduction
    gate: tuple[int, ...] | None = ()


def order_backward(regathers: Sequence[Regather], reductions: Sequence[Reduction], prefetch: int) -> list[Step]:
    """Returns the collectives of the backward pass in program order.

    The i-th regather is issued where the (i - prefetch)-th is first read, and waits until the one before that has been read: so
    many units may be gathered ahead of the one in use. Units whose uses interleave (a layer used twice within the window) are
    needed at once and held at once, whatever the limit.
    """
    regathers = sorted(regathers, key=lambda regather: (min(regather.uses), regather.unit))
    placed: list[tuple[float, int, Step]] = []
    for i, regather in enumerate(regathers):
        position = min(regathers[max(0, i - prefetch)].uses)
        if i <= prefetch:
            gate = None
        else:
            # A use at or after the place of issue may depend on what is issued there: waiting for it could be a cycle.
            gate = tuple(use for use in regathers[i - prefetch - 1].uses if use < position)
        if not regather.is_kept:
            placed.append((position - 0.5, i, Step(regather, gate)))
    for reduction in reductions:
        placed.append((reduction.ready + 0.5, len(regathers) + reduction.unit, Step(reduction)))
    return [step for _, _, step in sorted(placed, key=lambda entry: entry[:2])]
