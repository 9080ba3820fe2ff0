"""Ranks that would wait for each other for ever although all run the same collectives of every group: in different orders.

    rank 0   all-reduce of (0, 1), all-reduce of (0, 2)         each waits in its first one: 0 for 1, 1 for 2 and 2 for 0
    rank 1   all-reduce of (1, 2), all-reduce of (0, 1)
    rank 2   all-reduce of (0, 2), all-reduce of (1, 2)

A rank's collectives are a chain, and one begins when the one before it is over; a GPU could not do otherwise, because one of
NCCL's kernels that has begun holds it. So it is enough to let all ranks walk along their chains.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdist.collectives.plan import CollectiveRecord, Ranks


def ranks_in_circles(programs: Mapping[int, Sequence[CollectiveRecord]]) -> dict[int, CollectiveRecord]:
    """Returns, by rank, the collective in which it waits for ever; empty: all come to their ends.

    Args:
        programs: the collectives of ranks, in order, of which all ranks of a group have the same of that group. Ranks that are
            not in it are taken to come to every collective. Messages without an order do not count.
    """
    chains = {rank: [one for one in records if one.op != "message"] for rank, records in programs.items()}
    places = dict.fromkeys(chains, 0)
    arrived: collections.Counter[Ranks] = collections.Counter()
    complete: list[Ranks] = []

    def arrive(rank: int) -> None:
        if places[rank] == len(chains[rank]):
            return
        ranks = chains[rank][places[rank]].ranks
        arrived[ranks] += 1
        if arrived[ranks] == sum(other in chains for other in ranks):
            complete.append(ranks)

    for rank in chains:
        arrive(rank)
    while complete:
        ranks = complete.pop()
        arrived[ranks] = 0
        for rank in ranks:
            if rank in chains:
                places[rank] += 1
                arrive(rank)
    return {rank: chain[places[rank]] for rank, chain in chains.items() if places[rank] < len(chain)}
