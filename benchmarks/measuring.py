"""What the processes of a job measure in the same way in every framework: seconds of steps, and resident memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from benchmarks.resident import PeakResident

Fields = dict[str, Any]
Answer = Callable[[Fields], None]
Requests = Iterator[Fields]


class Loop(Protocol):
    """A model that can be trained, in any framework."""

    def run(self, steps: int) -> tuple[float, float]:
        """Runs `steps` steps; returns seconds and the last loss, of the global batch."""

    def time_steps(self, steps: int) -> tuple[list[float], float]:
        """As `run`, with the seconds of each step."""


def measure_steps(build: Callable[[], Loop], describe: Callable[[Loop], Fields], answer: Answer, requests: Requests) -> None:
    """Builds and warms up, says how long that took, then answers every `{"steps": n}` with the seconds of each of n steps.

    Three steps warm up; the first traces. Before those that are timed another one lets the ranks meet.
    """
    start = time.perf_counter()
    loop = build()
    build_seconds = time.perf_counter() - start
    first_step_seconds, _ = loop.run(1)
    _, loss = loop.run(2)
    answer(
        {"warmup_loss": loss, "build_seconds": build_seconds, "first_step_seconds": first_step_seconds, **describe(loop)}
    )
    for request in requests:
        loop.run(1)
        cpu = time.process_time()
        seconds, loss = loop.time_steps(request["steps"])
        answer({"step_seconds": seconds, "cpu_seconds": (time.process_time() - cpu) / request["steps"], "loss": loss})


def train_in_phases(build: Callable[[], Loop], steps: int) -> tuple[Loop, float, dict[str, PeakResident]]:
    """Builds, and runs `steps` steps, at least two; returns the loop, its last loss and the resident memory of each phase."""
    with PeakResident() as built:
        loop = build()
    with PeakResident() as first:
        loop.run(1)
    gc.collect()
    with PeakResident() as later:
        _, loss = loop.run(max(1, steps - 1))
    return loop, loss, {"build": built, "first_step": first, "steps": later}


def memory_fields(phases: dict[str, PeakResident]) -> Fields:
    """Returns the fields of an answer that say what was resident at the peak, and in each phase."""
    return {
        "peak_rss_bytes": max(peak.bytes for peak in phases.values()),
        "phase_peak_rss_bytes": {name: peak.bytes for name, peak in phases.items()},
        "has_high_water_mark": all(peak.has_high_water_mark for peak in phases.values()),
    }
