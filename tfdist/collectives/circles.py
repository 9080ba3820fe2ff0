"""Ranks that would wait for each other for ever although all run the same collectives of every group: in different orders.

    rank 0   all-reduce of (0, 1), all-reduce of (0, 2)         each waits in its first one: 0 for 1, 1 for 2 and 2 for 0
    rank 1   all-reduce of (1, 2), all-reduce of (0, 1)
    rank 2   all-reduce of (0, 2), all-reduce of (1, 2)

On GPUs this is NCCL's classic deadlock: several communicators of a device, in orders that differ between ranks.

Note: one order of all is enough. Given are

    (1) a chain for each rank: its collectives stand on its token, and one begins when the one before it is over. A GPU could not
        do otherwise, because one of NCCL's kernels that has begun holds it until all members have come;
    (2) the k-th collective of a group is the same for all its members, and over once all members have begun it.

Then all ranks come to their ends if and only if all collectives of all ranks can be put in one sequence of which each rank's
chain is a part. If there is such a sequence: take the first collective in it that is not over. All that stands before it is
over, so each of its members has run what its own chain has before it, and begins it; so it will be over, and then the next. If
there is none, "stands before" on the chains has a circle, and each collective of a circle waits for the one before it.

The ranks of a program have such a sequence: the program. All trace one function, and who has no part in a collective leaves it
out. Ranks along the axis "pipe" have different layers, but those with the same ones run the same, and all take what they do and
their messages from one sequence, that of the schedule in time. A branch that is not taken leaves collectives out for all their
members, and a part of a sequence is one. A rank begins a step when the one before has ended there, so that the steps' sequences
follow each other.

A user's own collectives may have no such sequence. So each traced step is looked at before it runs: the chains of a process's
ranks by `CollectivePlan`, those of all processes by `PlanAgreement`. Both walk along the chains as the ranks would.

The making of NCCL's communicators is such a collective itself: see `transports.member_order.make_groups`.
"""

import collections
from collections.abc import Mapping, Sequence

Ranks = tuple[int, ...]  # the members of a group, in group order


def ranks_in_circles(chains: Mapping[int, Sequence[Ranks]]) -> dict[int, int]:
    """Returns, by rank, the place in its chain of the collective in which it waits for ever; empty: all come to their ends.

    Args:
        chains: the groups of the ranks' collectives, in order, of which all ranks of a group have equally many. Ranks that are
            not in it are taken to come to every collective.
    """
    places = dict.fromkeys(chains, 0)
    arrived: collections.Counter[Ranks] = collections.Counter()
    complete: list[Ranks] = []

    def arrive(rank: int) -> None:
        if places[rank] == len(chains[rank]):
            return
        ranks = chains[rank][places[rank]]
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
    return {rank: place for rank, place in places.items() if place < len(chains[rank])}
