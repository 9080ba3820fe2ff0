"""The order in which TensorFlow's executor runs the operations of a graph on CPUs.

What has become ready and costs little runs at once in the thread that made it ready, first in first out. Of what is expensive,
one operation goes on in that thread if there is nothing else, and the others go to the front of the thread's own queue in the
pool. A thread takes from the front of its queue; one that has none, from the back of another's. (TensorFlow's `executor.cc`,
`ScheduleReady`; Eigen's `NonBlockingThreadPool`.)

When several threads race, chance has a part in the order. Here each operation takes the time that its bytes and FLOPs say.
Collectives hold no thread while their bytes travel. Of two that begin at once and take about the same time, as the gradients of a
convolution's filters and of its input, either may end first: what one of them reads is there when the other has ended, and what
follows from that begins.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Collection, Sequence

THREADS = 2
# Of its time, by which an operation may end later than planned. Gradients of filters take 0.91 to 1.10 times as long as those of
# inputs (oneDNN, 11 shapes, seconds of the processor).
CHANCE = 0.1


def execution_order(
    before: Sequence[Sequence[int]],
    runs: Sequence[bool],
    inline: Sequence[bool],
    seconds: Sequence[float],
    travels: Collection[int] = (),
    threads: int = THREADS,
    chance: float = CHANCE,
) -> tuple[list[int], list[int]]:
    """Returns the operations that run, in the order in which they begin, and for each the place of the last that begins before
    it ends, or may do so.

    Args:
        before: for each operation those that it waits for.
        runs: whether it runs at all.
        inline: whether it costs little.
        seconds: how long it takes.
        travels: the operations that hold no thread.
        threads: how many threads the pool has.
        chance: the part of its time by which an operation may end later.
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
    began: list[tuple[float, int]] = []  # when, and on which thread
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
            began.append((now, thread))
        return True

    def may_end(number: int, end: int) -> int:
        """Returns the place of the last operation that may begin before that at `number` ends: on another thread, on which one
        began with it that ends about when it does, and not for it."""
        own, (start, thread) = order[number], began[number]
        margin, usual = chance * seconds[own], start + seconds[own]
        beside = next((place for place in range(end, -1, -1) if began[place][1] != thread), None)
        if beside is None or abs(began[beside][0] - start) > margin or began[beside][0] + seconds[order[beside]] < usual - margin:
            return end
        last = end
        while last + 1 < len(order) and began[last + 1][0] < usual + margin:
            last += 1
            if began[last][1] != thread and own not in before[order[last]]:
                end = last
        return end

    while True:
        idle = {thread for thread in sorted(idle) if not begin(thread)}
        if not running:
            return order, [may_end(number, end) for number, end in enumerate(ends)]
        now, thread, number = heapq.heappop(running)
        place, ends[number] = order[number], len(order) - 1
        for other in after[place]:
            missing[other] -= 1
        ready = [other for other in after[place] if not missing[other]]
        queues[thread].extend(other for other in ready if inline[other])
        expensive = [other for other in ready if not inline[other]]
        if expensive and not queues[thread]:
            queues[thread].append(expensive.pop())
        pools[thread].extendleft(expensive)
        if place not in travels:
            idle.add(thread)
