"""Split points of a sequence of costs, between which the costs are alike."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from tfdist import errors


def balanced_split_points(costs: Sequence[float], num_parts: int) -> list[int]:
    """Splits a sequence in parts, none empty, so that the largest sum of a part is as small as can be.

        costs     3  1  1  4  2  2        3 parts
        parts    [3  1  1][4][2  2]       sums 5, 4, 4

    A pipeline is as fast as its slowest stage. Among the splits with the least largest sum this one has the least sum of squares,
    so that the sums are as even as can be. Both minima are exact, also for integers of any size.

    Args:
        costs: the costs of the items, finite and not negative.
        num_parts: how many parts.

    Returns:
        The places before which a part begins, ascending, without 0: `num_parts - 1` of them.

    Raises:
        ValueError: there are fewer items than parts, `num_parts` is less than 1, or a cost is negative or not finite.
    """
    if not 1 <= num_parts <= len(costs):
        raise errors.value_error(
            f"`num_parts` must be at least 1 and at most {len(costs)}, the number of costs, so that no part is empty.",
            num_parts=num_parts,
        )
    wrong = [cost for cost in costs if not 0 <= cost < math.inf]
    if wrong:
        raise errors.value_error("`costs` must be finite and not negative.", costs=wrong)
    sums = list(itertools.accumulate(costs, initial=0))
    return _most_even(sums, num_parts, _least_largest(sums, num_parts))


def _least_largest(sums: Sequence[float], num_parts: int) -> float:
    """Returns the largest sum of a part in the best split, from the `sums` of the first 0, 1, ... items.

    Each round has one part more. For the first `stop` items the best start of the last part is where the sum of that part, which
    falls with `start`, meets the best largest sum of the parts before it, which rises with `start`.
    """
    count = len(sums) - 1
    largest = {stop: sums[stop] for stop in range(1, count + 1)}
    for parts in range(2, num_parts + 1):
        before, largest = largest, {}
        for stop in range(parts, count + 1):
            starts = range(parts - 1, stop)
            meet = bisect.bisect_left(starts, True, key=lambda start, stop=stop: before[start] >= sums[stop] - sums[start])  # type: ignore[misc]
            largest[stop] = min(max(before[start], sums[stop] - sums[start]) for start in starts[max(meet - 1, 0) : meet + 1])
    return largest[count]


def _most_even(sums: Sequence[float], num_parts: int, largest: float) -> list[int]:
    """Returns the split points with the least sum of squares among those that leave no part above `largest`."""
    count = len(sums) - 1
    squares: dict[int, float] = {0: 0}  # the least sum of squares, by how many items are in parts
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
    bounds = [count]
    for starts in reversed(chosen):
        bounds.insert(0, starts[bounds[0]])
    return bounds[1:-1]
