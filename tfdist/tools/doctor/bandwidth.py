"""How fast each collective moves bytes, by size, in the terms of nccl-tests; and whether what arrives is what was sent.

    algorithm bandwidth = S / time; bus bandwidth = algorithm bandwidth x factor, which is comparable with the speed of a link

What S is of each collective, and its factor: `planning.hardware.BUS_FACTORS`.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import collectives
from tfdist.tools.doctor.check import Check, Finding
from tfdist.tools.doctor.session import Session
from tfdist.tools.doctor.timing import Timed
from tfdist.tools.planning.hardware import BUS_FACTORS

MIB = 2**20
_SIZES = (64 * 1024, MIB, 16 * MIB, 64 * MIB)
_QUICK_SIZES = (64 * 1024, MIB)
# So many bytes are moved by several calls in a row that are timed at once, by two at least: the ranks take a while to meet.
_AT_ONCE_BYTES = 16 * MIB
_MOST_CALLS = 16
_LIMIT_SECONDS = 4.0


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective as it is measured."""

    # Takes a rank's tensor, its place in the group, N and the axis; returns what arrives, None on a rank that takes no part.
    call: Callable[[tf.Tensor, int, int, str], tf.Tensor | None]
    input_part: Callable[[int], float] = lambda n: 1.0  # the part of S that a rank's tensor has, given N
    # What the first element that arrives must be when every rank sends its place plus 1, given the place and N.
    first: Callable[[int, int], float] = lambda place, n: 1.0


def _send(x: tf.Tensor, place: int, n: int, axis: str) -> tf.Tensor | None:
    """Each member at an even place sends to the one after it."""
    if place % 2:
        return collectives.receive(x.shape, x.dtype, place - 1, axis)
    return collectives.send(x, place + 1, axis) if place + 1 < n else None


def _sum(_: int, n: int) -> float:
    return n * (n + 1) / 2


def _over(op: Callable[..., tf.Tensor]) -> Callable[[tf.Tensor, int, int, str], tf.Tensor]:
    return lambda x, place, n, axis: op(x, axis)


COLLECTIVES = {
    "reduce_scatter": Collective(_over(collectives.reduce_scatter), first=_sum),
    "all_gather": Collective(_over(collectives.all_gather), lambda n: 1 / n),
    "all_reduce": Collective(_over(collectives.all_reduce), first=_sum),
    "broadcast": Collective(_over(collectives.broadcast)),
    "all_to_all": Collective(_over(collectives.all_to_all)),
    "send": Collective(_send, first=lambda place, n: float(place) if place % 2 else 0.0),
}


def bandwidth_checks() -> list[Check]:
    """Returns a check for each collective."""
    return [Check(f"bandwidth/{name}", functools.partial(_measure, name)) for name in COLLECTIVES]


def _measure(name: str, session: Session) -> Finding:
    session.needs_several("a collective")
    rows, skipped = measured_rows(name, session.base, _QUICK_SIZES if session.is_quick else _SIZES)
    best = max(row["bus_gb_per_second"] for row in rows)
    left = f"; left out as too slow here: {', '.join(f'{size:,} bytes' for size in skipped)}" if skipped else ""
    return Finding(f"up to {best:.3g} GB/s{left}", {"sizes": rows})


def measured_rows(
    name: str, strategy: Any, sizes: Sequence[int], axis: str = "data", limit_seconds: float = _LIMIT_SECONDS
) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns the time and bandwidth of a collective for each size, and the sizes that would have taken too long.

    Args:
        name: one of `COLLECTIVES`.
        strategy: over the ranks; all workers measure the same at once.
        sizes: S in bytes, about: the number of ranks divides what is measured.
        axis: of the mesh, in whose groups it is called.
        limit_seconds: a size is left out when a single call would take longer.

    Raises:
        RuntimeError: what arrives is wrong.
    """
    collective = COLLECTIVES[name]
    n = strategy.mesh.size(axis)
    rows: list[dict[str, Any]] = []
    skipped: list[int] = []
    for size in sizes:
        elements = max(1, size // 4 // n) * n  # of S; N divides it
        repeats = max(2, min(_MOST_CALLS, _AT_ONCE_BYTES // size))
        expected = rows[-1]["seconds"] * 4 * elements / rows[-1]["bytes"] if rows else 0.0
        if strategy.share(f"doctor: the time of {name}", repr(expected > limit_seconds)) == "True":
            skipped.append(4 * elements)
            continue
        seconds = _seconds(strategy, collective, round(elements * collective.input_part(n)), repeats, n, axis)
        speed = 4 * elements / seconds / 1e9
        rows.append(
            {
                "bytes": 4 * elements,
                "seconds": seconds,
                "algorithm_gb_per_second": speed,
                "bus_gb_per_second": speed * BUS_FACTORS[name](n),
            }
        )
    return rows, skipped


def _seconds(strategy: Any, collective: Collective, elements: int, repeats: int, n: int, axis: str) -> float:
    """Returns the median time of one call, on this worker. Raises RuntimeError when what arrives is wrong."""

    def place_of(rank: int) -> int:
        return strategy.mesh.group_ranks(axis, rank).index(rank)

    def on_rank(_: tf.Tensor) -> tf.Tensor:
        place = place_of(collectives.current_program("the doctor").rank)
        value = tf.fill([elements], tf.constant(place + 1, tf.float32))
        total = tf.zeros([])
        for _ in range(repeats):
            arrived = collective.call(value, place, n, axis)
            if arrived is not None:
                total += tf.reshape(arrived, [-1])[0]
        return total

    def check(rank: int, total: float) -> None:
        expected = repeats * collective.first(place_of(rank), n)
        if total != expected:
            raise RuntimeError(f"rank {rank} got {total:g} in the place of {expected:g}")

    return statistics.median(Timed(strategy, on_rank, check).rounds()) / repeats
