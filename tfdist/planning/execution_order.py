"""The order in which TensorFlow's executor runs the operations of a graph on CPUs.

What has become ready and costs little runs at once in the thread that made it ready, first in first out. Of what is expensive,
one operation goes on in that thread if there is nothing else, and the others go to the front of the thread's own queue in the
pool. A thread takes from the front of its queue; one that has none, from the back of another's. (TensorFlow's `executor.cc`,
`ScheduleReady`; Eigen's `NonBlockingThreadPool`.)

When several threads race, chance has a part in the order. Here each operation takes the time that its bytes and FLOPs say.
Collectives hold no thread while their bytes travel.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Collection, Sequence

THREADS = 2


def execution_order(
    before: Sequence[Sequence[int]],
    runs: Sequence[bool],
    inline: Sequence[bool],
    seconds: Sequence[float],
    travels: Collection[int] = (),
    threads: int = THREADS,
) -> tuple[list[int], list[int]]:
    """Returns the operations that run, in the order in which they begin, and for each the place of the last that begins before
    it ends.

    Args:
        before: for each operation those that it waits for.
        runs: whether it runs at all.
        inline: whether it costs little.
        seconds: how long it takes.
        travels: the operations that hold no thread.
        threads: how many threads the pool has.
    """
    after: list[list[int]] = [[] for _ in before]
    missing = [0] * len(before)
    for place, others in enumerate(before):
        if runs[place]:
            missing[place] = len(others)
            for other in others:
                after[other].append(place)
    pools: list[collections.deque[int]] = [collections.deque() for _ in range(threads)]
    roots = [place for place in range(len(before)) if runs[place] and not missing[place]]
    for number, place in enumerate(roots):
        pools[number % threads].append(place)
    queues: list[collections.deque[int]] = [collections.deque() for _ in range(threads)]
    order: list[int] = []
    ends: list[int] = []
    running: list[tuple[float, int, int]] = []  # when it ends, on which thread, its place in `order`
    idle = set(range(threads))
    now = 0.0

    def begin(thread: int) -> bool:
        place = -1
        while place < 0 or place in travels:
            source = queues[thread] or pools[thread]
            if source:
                place = source.popleft()
            else:
                others = [pool for pool in pools if pool]
                if not others:
                    return False
                place = others[0].pop()
            heapq.heappush(running, (now + seconds[place], thread, len(order)))
            order.append(place)
            ends.append(0)
        return True

    while True:
        idle = {thread for thread in sorted(idle) if not begin(thread)}
        if not running:
            return order, ends
        now, thread, number = heapq.heappop(running)
        ends[number] = len(order) - 1
        _make_ready(order[number], after, missing, inline, queues[thread], pools[thread])
        if order[number] not in travels:
            idle.add(thread)


def _make_ready(
    place: int,
    after: Sequence[Sequence[int]],
    missing: list[int],
    inline: Sequence[bool],
    queue: collections.deque[int],
    pool: collections.deque[int],
) -> None:
    """Hands what waited for `place` alone to its thread's queue, or to the pool."""
    expensive = -1
    for other in after[place]:
        missing[other] -= 1
        if missing[other]:
            continue
        if inline[other]:
            queue.append(other)
            continue
        if expensive >= 0:
            pool.appendleft(expensive)
        expensive = other
    if expensive >= 0:
        if queue:
            pool.appendleft(expensive)
        else:
            queue.append(expensive)
