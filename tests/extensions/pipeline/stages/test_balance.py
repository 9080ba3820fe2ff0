"""Balanced split_points against all there are."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.extensions.pipeline.stages.split_points import balanced_split_points


def sums_of(costs, split_points):
    return [sum(costs[start:stop]) for start, stop in itertools.pairwise([0, *split_points, len(costs)])]


def score(costs, split_points):
    sums = sums_of(costs, split_points)
    return max(sums), sum(part**2 for part in sums)


@given(st.data())
def test_it_is_the_best(data):
    costs = data.draw(st.lists(st.integers(0, 12) | st.integers(0, 10**40), min_size=1, max_size=8))
    num_parts = data.draw(st.integers(1, len(costs)))
    split_points = balanced_split_points(costs, num_parts)
    every = list(itertools.combinations(range(1, len(costs)), num_parts - 1))
    assert tuple(split_points) in every
    assert score(costs, split_points) == min(score(costs, other) for other in every)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=9))
def test_of_fractions(costs):
    split_points = balanced_split_points(costs, 2)
    best = min(max(sums_of(costs, [cut])) for cut in range(1, len(costs)))
    assert max(sums_of(costs, split_points)) == pytest.approx(best)


def test_by_hand():
    assert balanced_split_points([3, 1, 1, 4, 2, 2], 3) == [3, 4]
    assert balanced_split_points([6, 1, 1, 1, 1], 3) == [1, 3]  # 6, 2, 2 is more even than 6, 1, 3
    assert balanced_split_points([1] * 12, 4) == [3, 6, 9]
    assert balanced_split_points([0, 0, 0], 3) == [1, 2]
    assert balanced_split_points([7], 1) == []


@pytest.mark.parametrize("num_parts", [0, 4])
def test_numbers_of_parts(num_parts):
    with pytest.raises(ValueError, match=f"at least 1 and at most 3, .* Received: num_parts={num_parts}"):
        balanced_split_points([1, 2, 3], num_parts)


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf")])
def test_costs_that_are_none(cost):
    with pytest.raises(ValueError, match=f"finite and not negative. Received: costs=.{cost}"):
        balanced_split_points([1, cost], 2)
