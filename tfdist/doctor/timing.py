"""How long something takes that all ranks of all workers do at once."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import collectives, errors
from tfdist.mesh import MESH_AXES

# Something is measured for about so long, in at most so many rounds.
_SECONDS = 0.3
_ROUNDS = 8
# Of things that are done several times: how long they take together, and how often they are done at most.
_MEASURABLE_SECONDS = 0.1
_MOST_THINGS = 2**17
_MOST_GROWTH = 64
# How many operations stand in a trip of a loop, whose own are few beside them.
_IN_A_TRIP = 64

# Several things that are done one after another: called on each rank, returns what the first is given, and what does one, which
# returns what the next is given.
Things = Callable[[], tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]]


def median_seconds(strategy: Any, on_rank: Callable[[], tf.Tensor], check: Callable[[int, float], None] | None = None) -> float:
    """Returns the median time of what every rank computes, on this worker; the arguments are those of `rounds`."""
    return statistics.median(rounds(strategy, on_rank, check))


def least_seconds(strategy: Any, on_rank: Callable[[], tf.Tensor]) -> float:
    """Returns the least time of what every rank computes: without what else the machine may do."""
    return min(rounds(strategy, on_rank))


def seconds_of_one(strategy: Any, things: Things, count: int = 1, in_a_trip: int = _IN_A_TRIP) -> float:
    """Returns the time of one of several things that every rank does one after another: of some and one more, less that of one.

    They are so many that their time is long beside what workers take to meet. They stand in a loop, several in a trip: a GPU does
    tens of thousands in that time, which would take minutes to trace.

    Args:
        strategy: whose ranks do it; all workers measure the same at once.
        things: what is done, and what it begins with.
        count: how many things are tried first.
        in_a_trip: how many at most stand in a trip of the loop: one where a thing is many operations.

    Raises:
        RuntimeError: many thousands of them take no time.
    """
    one = least_seconds(strategy, functools.partial(_done, things, 0, 1))
    while True:
        seconds = least_seconds(strategy, functools.partial(_done, things, count, min(count, in_a_trip))) - one
        growth = min(math.ceil(1.5 * _MEASURABLE_SECONDS / max(seconds, 1e-9)), _MOST_GROWTH, _MOST_THINGS // count)
        growth = int(strategy.share("doctor: growth", str(growth if seconds < _MEASURABLE_SECONDS else 1)))
        if growth <= 1:
            break
        count = _whole_trips(count * growth, in_a_trip)
    if seconds <= 0:
        raise errors.runtime_error("What is to be measured takes no longer than what is around it.", count=count)
    return seconds / count


def _whole_trips(count: int, in_a_trip: int) -> int:
    """Returns the least number from `count` on that is done in equal trips of a loop."""
    trip = min(count, in_a_trip)
    return math.ceil(count / trip) * trip


def _done(things: Things, count: int, in_a_trip: int) -> tf.Tensor:
    """Returns a number that depends on one thing, and on `count` more in a loop."""
    x, thing = things()
    x = thing(x)

    def trip(x: tf.Tensor) -> list[tf.Tensor]:
        for _ in range(in_a_trip):
            x = thing(x)
        return [x]

    if count:
        (x,) = tf.while_loop(lambda _: True, trip, [x], maximum_iterations=math.ceil(count / in_a_trip))
    return tf.cast(tf.reshape(x, [-1])[0], tf.float32)


def rounds(
    strategy: Any,
    on_rank: Callable[[], tf.Tensor],
    check: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Returns the times of several rounds in which every rank computes something, on this worker.

    From when all ranks have met until the last is through, by a clock that is read within the step: workers leave a barrier
    milliseconds apart, and who begins last would have the least time. Workers that share a processor have what they share then.
    What ranks take to meet at the end is in the time, and not in the difference of two.

    Args:
        strategy: whose `run` calls it; all workers measure the same at once.
        on_rank: returns one number, which depends on all that is to be measured.
        check: is given each local rank and its number, once, before anything is measured.
    """

    def timed() -> tf.Tensor:
        start = _when_all_have(strategy, tf.zeros([]))
        with tf.control_dependencies([start]):
            number = on_rank()
        return tf.stack([tf.cast(number, tf.float64), _when_all_have(strategy, number) - start])

    move = tf.function(lambda: strategy.experimental_local_results(strategy.run(timed)))
    for rank, (number, _) in zip(strategy.extended.communicator.local_ranks, _values(move()), strict=True):
        if check is not None:
            check(rank, number)
    once = max(seconds for _, seconds in _values(move()))
    count = int(strategy.share("doctor: rounds", str(max(1, min(_ROUNDS, int(_SECONDS / max(once, 1e-9)))))))
    return [max(seconds for _, seconds in _values(move())) for _ in range(count)]


def _when_all_have(strategy: Any, number: tf.Tensor) -> tf.Tensor:
    """Returns the seconds of the clock when every rank has its `number`."""
    with tf.control_dependencies([number]):
        met = tf.zeros([1])
    for axis in MESH_AXES:
        if strategy.mesh.size(axis) > 1:
            met = collectives.all_reduce(met, axis)
    # What has a state is done in the order of the ranks: one's end before another's start.
    return tf.numpy_function(lambda _: np.float64(time.perf_counter()), [met], tf.float64, stateful=False)


def _values(numbers: Any) -> list[list[float]]:
    return [number.numpy().tolist() for number in numbers]
