"""Buckets: consecutive, in order, of one kind, as full as allowed."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tfdist.collectives import assign_buckets

SIZES = st.lists(st.integers(0, 50), max_size=30)
LIMIT = st.integers(1, 100)


@given(SIZES, LIMIT)
def test_one_kind(sizes, limit):
    buckets = assign_buckets(sizes, limit)
    assert list(itertools.chain(*buckets)) == list(range(len(sizes)))
    totals = [sum(sizes[index] for index in bucket) for bucket in buckets]
    for bucket, total in zip(buckets, totals, strict=True):
        assert bucket
        assert total <= limit or len(bucket) == 1
    for total, following in zip(totals, buckets[1:], strict=False):
        assert total + sizes[following[0]] > limit, "closed too early"


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from("ab")), max_size=30), LIMIT)
def test_several_kinds(tensors, limit):
    sizes, kinds = [size for size, _ in tensors], [kind for _, kind in tensors]
    buckets = assign_buckets(sizes, limit, kinds)
    assert sorted(itertools.chain(*buckets)) == list(range(len(sizes)))
    for kind in "ab":
        mine = [index for index in range(len(sizes)) if kinds[index] == kind]
        alone = assign_buckets([sizes[index] for index in mine], limit)
        # A kind is bucketed as if the other were not there.
        assert [b for b in buckets if kinds[b[0]] == kind] == [[mine[index] for index in bucket] for bucket in alone]
    assert all(len({kinds[index] for index in bucket}) == 1 for bucket in buckets)


def test_examples():
    assert assign_buckets([], 10) == []
    assert assign_buckets([4, 4, 4], 8) == [[0, 1], [2]]
    assert assign_buckets([4, 99, 4], 8) == [[0], [1], [2]]
    assert assign_buckets([4, 4, 4, 4], 8, ["f", "h", "f", "h"]) == [[0, 2], [1, 3]]
    assert assign_buckets([0, 0, 0], 1) == [[0, 1, 2]]
    assert assign_buckets([5, 5, 5], 1) == [[0], [1], [2]]
