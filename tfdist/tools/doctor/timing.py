"""How long something takes that all ranks of all workers do at once."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import collectives, errors
from tfdist.mesh import MESH_AXES

# Something is measured for about so long, in at most so many rounds.
_SECONDS = 0.2
_ROUNDS = 8
# Of things that are done several times: how long they take together, and how often they are done at most.
_MEASURABLE_SECONDS = 0.1
_MOST_THINGS = 2**17
_MOST_GROWTH = 64
# How many short operations stand in a trip of a loop, whose own are few beside them; and how short they are.
_IN_A_TRIP = 64
_SHORT_SECONDS = 0.5e-3

# Several things that are done one after another: called on each rank, returns what the first is given, and what does one, which
# returns what the next is given.
Things = Callable[[], tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]]
# Called on each rank with the number of trips of its loop, if it has one; returns a number that depends on all that is measured.
OnRank = Callable[[tf.Tensor], tf.Tensor]


def least_seconds(strategy: Any, on_rank: Callable[[], tf.Tensor]) -> float:
    """Returns the least time of what every rank computes: without what else the machine may do."""
    return min(Timed(strategy, lambda _: on_rank()).rounds())


def seconds_of_one(strategy: Any, things: Things) -> float:
    """Returns the time of one of several things that every rank does one after another: of some and one more, less that of one.

    They are so many that their time is long beside what workers take to meet. They stand in a loop: a GPU does tens of thousands
    in that time, which would take minutes to trace.

    Raises:
        RuntimeError: many thousands of them take no time.
    """
    seconds, count = _seconds_of_loops(strategy, things, 1, 1)
    if strategy.share("doctor: is short", repr(seconds / count < _SHORT_SECONDS)) == "True":
        seconds, trips = _seconds_of_loops(strategy, things, math.ceil(count / _IN_A_TRIP), _IN_A_TRIP)
        count = trips * _IN_A_TRIP
    if seconds <= 0:
        raise errors.runtime_error("What is to be measured takes no longer than what is around it.", count=count)
    return seconds / count


def _seconds_of_loops(strategy: Any, things: Things, trips: int, in_a_trip: int) -> tuple[float, int]:
    """Returns the time of a loop that is long enough, and its trips, the same on all workers: `trips` are tried first."""
    timed = Timed(strategy, functools.partial(_done, things, in_a_trip))
    alone = min(timed.rounds(0))
    while True:
        seconds = min(timed.rounds(trips)) - alone
        growth = math.ceil(1.5 * _MEASURABLE_SECONDS / max(seconds, 1e-9))
        growth = min(growth, _MOST_GROWTH, _MOST_THINGS // (trips * in_a_trip))
        growth = int(strategy.share("doctor: growth", str(growth if seconds < _MEASURABLE_SECONDS else 1)))
        if growth <= 1:
            return seconds, trips
        trips *= growth


def _done(things: Things, in_a_trip: int, trips: tf.Tensor) -> tf.Tensor:
    """Returns a number that depends on one thing, and on more in so many trips of a loop."""
    x, thing = things()
    x = thing(x)

    def trip(x: tf.Tensor) -> list[tf.Tensor]:
        for _ in range(in_a_trip):
            x = thing(x)
        return [x]

    (x,) = tf.while_loop(lambda _: True, trip, [x], maximum_iterations=trips)
    return tf.cast(tf.reshape(x, [-1])[0], tf.float32)


class Timed:
    """A computation of every rank, timed on this worker as often as asked for.

    From when all ranks have met until the last is through, by a clock that is read within the step: workers leave a barrier
    milliseconds apart, and who begins last would have the least time. Workers that share a processor have what they share then.
    What ranks take to meet at the end is in the time, and not in the difference of two.

    Args:
        strategy: whose `run` calls it; all workers measure the same at once.
        on_rank: what is computed.
        check: is given each local rank and its number, before anything is measured.
    """

    def __init__(self, strategy: Any, on_rank: OnRank, check: Callable[[int, float], None] | None = None):
        self._strategy = strategy
        self._check = check

        def timed(trips: tf.Tensor) -> tf.Tensor:
            start = _when_all_have(strategy, tf.cast(trips, tf.float32), trips)
            with tf.control_dependencies([start]):
                number = on_rank(trips)
            return tf.stack([tf.cast(number, tf.float64), _when_all_have(strategy, number, trips) - start])

        move = tf.function(lambda trips: strategy.experimental_local_results(strategy.run(timed, (trips,))))
        self._move = move.get_concrete_function(tf.TensorSpec([], tf.int32))

    def rounds(self, trips: int = 0) -> list[float]:
        """Returns the times of several rounds, with so many trips of the loop."""
        for rank, (number, _) in zip(self._strategy.extended.communicator.local_ranks, self._values(trips), strict=True):
            if self._check is not None:
                self._check(rank, number)
        once = self._seconds(trips)
        count = int(self._strategy.share("doctor: rounds", str(max(1, min(_ROUNDS, int(_SECONDS / max(once, 1e-9)))))))
        return [self._seconds(trips) for _ in range(count)]

    def _seconds(self, trips: int) -> float:
        return max(seconds for _, seconds in self._values(trips))

    def _values(self, trips: int) -> list[list[float]]:
        return [number.numpy().tolist() for number in self._move(tf.constant(trips))]


def _when_all_have(strategy: Any, number: tf.Tensor, trips: tf.Tensor) -> tf.Tensor:
    """Returns the seconds of the clock when every rank has its `number`."""
    met = tf.reshape(number, [1])
    for axis in MESH_AXES:
        if strategy.mesh.size(axis) > 1:
            met = collectives.all_reduce(met, axis)
    # What has a state is done in the order of the ranks: one's end before another's start. What has none, and rests on constants,
    # the graph optimizer computes once: the number of trips is none.
    return tf.numpy_function(lambda *_: np.float64(time.perf_counter()), [met, trips], tf.float64, stateful=False)
