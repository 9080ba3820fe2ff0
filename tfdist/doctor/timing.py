"""How long something takes that all ranks of all workers do at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Something is measured for about so long, in at most so many rounds.
_SECONDS = 0.3
_ROUNDS = 8


def median_seconds(strategy: Any, on_rank: Callable[[], tf.Tensor], check: Callable[[int, float], None] | None = None) -> float:
    """Returns the median time of what every rank computes, on this worker; the arguments are those of `rounds`."""
    return statistics.median(rounds(strategy, on_rank, check))


def least_seconds(strategy: Any, on_rank: Callable[[], tf.Tensor]) -> float:
    """Returns the least time of what every rank computes, until the last worker is through: without what else the machine may do.

    Workers that share a processor have what they share then: one that is through first was alone for a while, or had more of it.
    What the workers take to meet is in the time, and not in the difference of two.
    """
    return min(rounds(strategy, on_rank, until_all=True))


def rounds(
    strategy: Any,
    on_rank: Callable[[], tf.Tensor],
    check: Callable[[int, float], None] | None = None,
    until_all: bool = False,
) -> list[float]:
    """Returns the times of several rounds in which every rank computes something, on this worker.

    Args:
        strategy: whose `run` calls it; all workers measure the same at once.
        on_rank: returns one number, which depends on all that is to be measured.
        check: is given each local rank and its number, once, before anything is measured.
        until_all: whether a round ends when all workers are through, not this one alone.
    """
    move = tf.function(lambda: strategy.experimental_local_results(strategy.run(on_rank)))
    for rank, number in zip(strategy.extended.communicator.local_ranks, move(), strict=True):
        if check is not None:
            check(rank, float(number))
        float(number)
    start = time.perf_counter()
    _wait_for(move())
    once = time.perf_counter() - start
    count = int(strategy.share("doctor: rounds", str(max(1, min(_ROUNDS, int(_SECONDS / once))))))
    found = []
    for _ in range(count):
        strategy.barrier("doctor: a round")
        start = time.perf_counter()
        _wait_for(move())
        if until_all:
            strategy.barrier("doctor: the end of a round")
        found.append(time.perf_counter() - start)
    return found


def _wait_for(numbers: Any) -> None:
    for number in numbers:
        float(number)
