"""Grouping many small tensors in few messages, and many operations in few parts."""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any


def assign_buckets(sizes: Sequence[int], bucket_bytes: int, kinds: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Splits the tensors 0, 1, ... in consecutive buckets of about `bucket_bytes`.

    A bucket is closed when the next tensor would take it past `bucket_bytes`; a tensor larger than that is a bucket of its own.
    Only tensors of one kind (a dtype, say) share a bucket; `kinds` None: all are of one. `sizes` are in bytes, in the order in
    which the tensors become ready; the buckets are lists of indices, in the order in which they can be closed.
    """
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    closed: list[list[int]] = []
    for index, size in enumerate(sizes):
        kind = kinds[index] if kinds is not None else None
        members, filled = open_buckets.get(kind, ([], 0))
        if members and filled + size > bucket_bytes:
            closed.append(members)
            members, filled = [], 0
        open_buckets[kind] = ([*members, index], filled + size)
    return closed + [members for members, _ in open_buckets.values()]


def in_parts(items: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Returns `items` in up to `count` runs of about equally many, none empty."""
    bounds = [len(items) * place // count for place in range(count + 1)]
    return [items[begin:end] for begin, end in itertools.pairwise(bounds) if begin < end]
