"""Cutting a sequence of costs in parts that cost alike."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from tfdist import errors


def balanced_cuts(costs: Sequence[float], num_parts: int) -> list[int]:
    """Cuts a sequence in parts, none empty, so that the largest sum of a part is as small as can be.

        costs     3  1  1  4  2  2        3 parts
        parts    [3  1  1][4][2  2]       sums 5, 4, 4

    A pipeline is as fast as its slowest stage. Among the cuts with the least largest sum those whose sums are most even, with
    the least sum of squares, are taken. Both are exact, for integers of any size, too.

    Args:
        costs: of the items, finite and not negative.
        num_parts: how many parts.

    Returns:
        The places before which a part begins, ascending, without 0: `num_parts - 1` of them.

    Raises:
        ValueError: there are fewer items than parts, `num_parts` is less than 1, or a cost is negative or not finite.
    """
    if not 1 <= num_parts <= len(costs):
        raise ValueError(
            errors.message(
                f"`num_parts` must be at least 1 and at most {len(costs)}, the number of costs, so that no part is empty.",
                num_parts=num_parts,
            )
        )
    wrong = [cost for cost in costs if not 0 <= cost < math.inf]
    if wrong:
        raise ValueError(errors.message("`costs` must be finite and not negative.", costs=wrong))
    sums = list(itertools.accumulate(costs, initial=0))
    return _most_even(sums, num_parts, _least_largest(sums, num_parts))


def _least_largest(sums: Sequence[float], num_parts: int) -> float:
    """Returns the largest sum of a part in the best cut, from the `sums` of the first 0, 1, ... items.

    The first `stop` items in one part more: the best start of that part is where the sum of the part, which falls with `start`,
    meets the best of the parts before, which rises.
    """
    count = len(sums) - 1
    largest = {stop: sums[stop] for stop in range(1, count + 1)}
    for parts in range(2, num_parts + 1):
        before, largest = largest, {}
        for stop in range(parts, count + 1):
            starts = range(parts - 1, stop)
            meet = bisect.bisect_left(starts, True, key=lambda start, stop=stop: before[start] >= sums[stop] - sums[start])
            largest[stop] = min(max(before[start], sums[stop] - sums[start]) for start in starts[max(meet - 1, 0) : meet + 1])
    return largest[count]


def _most_even(sums: Sequence[float], num_parts: int, largest: float) -> list[int]:
    """Returns the cuts with the least sum of squares among those without a part above `largest`."""
    count = len(sums) - 1
    squares = {0: 0}  # the least, by how many items are in parts
    chosen: list[dict[int, int]] = []  # where the last of 1, 2, ... parts starts
    for _ in range(num_parts):
        before, squares = squares, {}
        chosen.append({})
        for stop in range(1, count + 1):
            for start in range(stop - 1, -1, -1):
                part = sums[stop] - sums[start]
                if part > largest:
                    break
                if start in before and (stop not in squares or before[start] + part**2 < squares[stop]):
                    squares[stop], chosen[-1][stop] = before[start] + part**2, start
    cuts = [count]
    for starts in reversed(chosen):
        cuts.insert(0, starts[cuts[0]])
    return cuts[1:-1]
