"""Where collectives stand that are emitted behind those that they come before."""

import pytest

from tfdist.extensions.ordering.side_chain import merged


@pytest.mark.parametrize(
    ("side", "others", "blocks", "expected"),
    [
        ([], [0, 1], [], [0, 1]),
        ([2, 3, 4], [0, 1, 5], [], [0, 1, 2, 3, 4, 5]),  # all else stands where it is emitted
        ([2, 4], [0, 3, 5], [], [0, 2, 3, 4, 5]),
        ([2, 3, 4], [0, 5, 6, 7], [(range(5, 6), 1), (range(6, 7), 2), (range(7, 8), 3)], [0, 2, 5, 3, 6, 4, 7]),
        ([2, 3, 4], [5, 6], [(range(5, 6), 2), (range(6, 7), 0)], [2, 3, 5, 6, 4]),  # the places of a chain never fall
        ([2, 3], [4, 5, 6], [(range(4, 5), 0), (range(6, 7), 0)], [4, 2, 3, 5, 6]),  # 5 has no place, and 6 stands behind it
    ],
)
def test_both_chains_become_one(side, others, blocks, expected):
    assert merged(side, others, blocks) == expected
