"""How fast each collective moves bytes, by size, in the terms of nccl-tests; and whether what arrives is what was sent.

    algorithm bandwidth = S / time; bus bandwidth = algorithm bandwidth x factor, which is comparable with the speed of a link

| collective      | S, bytes                     | factor      |
|-----------------|------------------------------|-------------|
| all_reduce      | the tensor of each rank      | 2 (N - 1)/N |
| reduce_scatter  | the tensor before            | (N - 1)/N   |
| all_gather      | the tensor afterwards        | (N - 1)/N   |
| all_to_all      | the tensor of each rank      | (N - 1)/N   |
| broadcast, send | the tensor                   | 1           |

Source: PERFORMANCE.md of nccl-tests.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import collectives
from tfdist.doctor.check import Check, Finding
from tfdist.doctor.session import Session

MIB = 2**20
_SIZES = (64 * 1024, MIB, 16 * MIB, 64 * MIB)
_QUICK_SIZES = (64 * 1024, MIB)
_SMALL_BYTES = MIB  # up to here several calls in a row are timed at once
# A size is measured for about so long, and left out when a single call would take longer than the limit.
_SECONDS = 0.3
_LIMIT_SECONDS = 4.0
_ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective as it is measured.

    Attributes:
        call: takes a rank's tensor, its rank, and N; returns the tensor that arrives, None on a rank that takes no part.
        input_part: the part of S that a rank's tensor has, given N.
        bus_factor: given N.
        first: what the first element that arrives must be when every rank sends its number plus 1, given the rank and N.
    """

    call: Callable[[tf.Tensor, int, int], tf.Tensor | None]
    input_part: Callable[[int], float]
    bus_factor: Callable[[int], float]
    first: Callable[[int, int], float]


def _send(x: tf.Tensor, rank: int, n: int) -> tf.Tensor | None:
    """Each even rank sends to the one behind it."""
    if rank % 2:
        return collectives.receive(x.shape, x.dtype, rank - 1)
    return collectives.send(x, rank + 1) if rank + 1 < n else None


def _sum(_: int, n: int) -> float:
    return n * (n + 1) / 2


def _of_first(*_: int) -> float:
    return 1.0


COLLECTIVES = {
    "reduce_scatter": Collective(lambda x, *_: collectives.reduce_scatter(x), lambda n: 1, lambda n: (n - 1) / n, _sum),
    "all_gather": Collective(lambda x, *_: collectives.all_gather(x), lambda n: 1 / n, lambda n: (n - 1) / n, _of_first),
    "all_reduce": Collective(lambda x, *_: collectives.all_reduce(x), lambda n: 1, lambda n: 2 * (n - 1) / n, _sum),
    "broadcast": Collective(lambda x, *_: collectives.broadcast(x), lambda n: 1, lambda n: 1, _of_first),
    "all_to_all": Collective(lambda x, *_: collectives.all_to_all(x), lambda n: 1, lambda n: (n - 1) / n, _of_first),
    "send": Collective(_send, lambda n: 1, lambda n: 1, lambda rank, n: float(rank) if rank % 2 else 0.0),
}


def bandwidth_checks() -> list[Check]:
    """Returns a check for each collective."""
    return [Check(f"bandwidth/{name}", functools.partial(_measure, name)) for name in COLLECTIVES]


def _measure(name: str, session: Session) -> Finding:
    session.needs_several("a collective")
    n, collective = session.world_size, COLLECTIVES[name]
    rows: list[dict[str, Any]] = []
    skipped: list[int] = []
    for size in _QUICK_SIZES if session.is_quick else _SIZES:
        elements = max(1, size // 4 // n) * n  # of S; N divides it
        repeats = 8 if size <= _SMALL_BYTES else 2
        expected = rows[-1]["seconds"] * 4 * elements / rows[-1]["bytes"] if rows else 0.0
        if session.base.share(f"doctor: the time of {name}", repr(expected > _LIMIT_SECONDS)) == "True":
            skipped.append(4 * elements)
            continue
        seconds = _seconds(session, collective, round(elements * collective.input_part(n)), repeats)
        speed = 4 * elements / seconds / 1e9
        rows.append(
            {
                "bytes": 4 * elements,
                "seconds": seconds,
                "algorithm_gb_per_second": speed,
                "bus_gb_per_second": speed * collective.bus_factor(n),
            }
        )
    best = max(row["bus_gb_per_second"] for row in rows)
    left = f"; left out as too slow here: {', '.join(f'{size:,} bytes' for size in skipped)}" if skipped else ""
    return Finding(f"up to {best:.3g} GB/s{left}", {"sizes": rows})


def _seconds(session: Session, collective: Collective, elements: int, repeats: int) -> float:
    """Returns the median time of one call, on this worker. Raises RuntimeError when what arrives is wrong."""
    strategy, n = session.base, session.world_size

    def on_rank() -> tf.Tensor:
        rank = collectives.current_program("the doctor").rank
        value = tf.fill([elements], tf.constant(rank + 1, tf.float32))
        total = tf.zeros([])
        for _ in range(repeats):
            arrived = collective.call(value, rank, n)
            if arrived is not None:
                total += tf.reshape(arrived, [-1])[0]
        return total

    move = tf.function(lambda: strategy.experimental_local_results(strategy.run(on_rank)))
    start = time.perf_counter()
    for rank, total in zip(strategy.extended.communicator.local_ranks, move(), strict=True):
        expected = repeats * collective.first(rank, n)
        if float(total) != expected:
            raise RuntimeError(f"rank {rank} got {float(total):g} in the place of {expected:g}")
    start = time.perf_counter()
    float(move()[0])
    once = time.perf_counter() - start
    rounds = int(strategy.share("doctor: rounds", str(max(1, min(_ROUNDS, int(_SECONDS / once))))))
    found = []
    for _ in range(rounds):
        strategy.barrier("doctor: a round")
        start = time.perf_counter()
        for total in move():
            float(total)
        found.append(time.perf_counter() - start)
    return statistics.median(found) / repeats
