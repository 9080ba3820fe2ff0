"""What the processes of a job measure in the same way in every framework: seconds of steps, and memory."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from benchmarks.memory import Memory, Peak, growths
from benchmarks.resident import give_back

Fields = dict[str, Any]
Answer = Callable[[Fields], None]
Requests = Iterator[Fields]


WARMUP_STEPS = 3  # after which the losses of all contenders must agree


class Loop(Protocol):
    """A model that can be trained, in any framework."""

    def run(self, steps: int) -> tuple[float, float]:
        """Runs `steps` steps; returns seconds and the last loss, of the global batch."""

    def time_steps(self, steps: int) -> tuple[list[float], float]:
        """As `run`, with the seconds of each step."""


def warm_up(build: Callable[[], Loop], describe: Callable[[Loop], Fields]) -> tuple[Loop, Fields]:
    """Builds and runs three steps, of which the first traces; returns the loop, and how long that took."""
    start = time.perf_counter()
    loop = build()
    build_seconds = time.perf_counter() - start
    first_step_seconds, _ = loop.run(1)
    _, loss = loop.run(WARMUP_STEPS - 1)
    fields = {"warmup_loss": loss, "build_seconds": build_seconds, "first_step_seconds": first_step_seconds}
    return loop, {**fields, **describe(loop)}


def measure_steps(build: Callable[[], Loop], describe: Callable[[Loop], Fields], answer: Answer, requests: Requests) -> None:
    """Warms up, says how long that took, then answers every `{"steps": n}` with the seconds of each of n steps.

    Before those that are timed another one lets the ranks meet.
    """
    loop, fields = warm_up(build, describe)
    answer(fields)
    for request in requests:
        loop.run(1)
        cpu = time.process_time()
        seconds, loss = loop.time_steps(request["steps"])
        answer({"step_seconds": seconds, "cpu_seconds": (time.process_time() - cpu) / request["steps"], "loss": loss})


def measure_rounds(
    build: Callable[[], Loop], describe: Callable[[Loop], Fields], memory: Memory | None, answer: Answer, requests: Requests
) -> None:
    """Warms up, says how long that took, then answers every `{"steps": n}` with the seconds of n steps in a row.

    Between them nobody waits for the devices. With a `memory`, which must cost no time, also with its peak in these steps.
    """
    loop, fields = warm_up(build, describe)
    answer(fields)
    for request in requests:
        peak = contextlib.nullcontext() if memory is None else memory.peak()
        with peak:
            cpu = time.process_time()
            seconds, loss = loop.run(request["steps"])
            cpu = (time.process_time() - cpu) / request["steps"]
        fields = {} if memory is None else {"peak_bytes": peak.bytes}
        answer({"seconds": seconds, "cpu_seconds": cpu, "loss": loss, **fields})


@dataclasses.dataclass(frozen=True)
class Phases:
    """The memory of a process while it builds and trains.

    Attributes:
        peaks: by phase: "build", "first_step", "steps".
        warmup_loss: after the third step.
        loss: after the last.
    """

    peaks: dict[str, Peak]
    warmup_loss: float
    loss: float

    def fields(self) -> Fields:
        """Returns what an answer says of it."""
        return {
            "peak_rss_bytes": max(peak.bytes for peak in self.peaks.values()),
            "phase_peak_rss_bytes": {name: peak.bytes for name, peak in self.peaks.items()},
            "has_high_water_mark": all(peak.has_high_water_mark for peak in self.peaks.values()),
            "warmup_loss": self.warmup_loss,
            "loss": self.loss,
        }


def train_in_phases(build: Callable[[], Loop], steps: int, memory: Memory) -> tuple[Loop, Phases]:
    """Builds, and runs `steps` steps, at least three; returns the loop, and what was in use."""
    with memory.peak() as built:
        loop = build()
    with memory.peak() as first:
        loop.run(1)
    gc.collect()
    with memory.peak() as later:
        _, warmup_loss = loop.run(WARMUP_STEPS - 1)
        loss = loop.run(steps - WARMUP_STEPS)[1] if steps > WARMUP_STEPS else warmup_loss
    return loop, Phases({"build": built, "first_step": first, "steps": later}, warmup_loss, loss)


def serve(measure: Callable[[Fields, Answer, Requests], None]) -> None:
    """Calls `measure` with the first line of stdin, a way to answer and the lines that follow; tells the parent of an error.

    What libraries print goes to stderr; stdout carries answers only.
    """
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(fields: Fields) -> None:
        channel.write(json.dumps(fields) + "\n")
        channel.flush()

    requests = (json.loads(line) for line in sys.stdin)
    try:
        measure(next(requests), answer, requests)
    except Exception as error:  # noqa: BLE001 (the parent reports it)
        traceback.print_exc()
        with contextlib.suppress(BrokenPipeError):  # the parent is gone
            answer({"error": f"{type(error).__name__}: {error}"})


def stay(requests: Requests) -> None:
    """Returns when the parent ends the input: until then the other workers may not be done."""
    for _ in requests:
        pass


def measure_memory(
    build: Callable[[], Loop], describe: Callable[[Loop], Fields], memory: Memory, answer: Answer, requests: Requests
) -> None:
    """Answers once, to `{"steps": n}`: the memory of the process, or of its GPUs, at rest and at the peak of each phase."""
    give_back()
    imported = memory.in_use()
    answer({})
    loop, phases = train_in_phases(build, next(requests)["steps"], memory)
    give_back()
    answer({"imported_rss_bytes": imported, **phases.fields(), "at_rest_rss_bytes": memory.in_use(), **describe(loop)})


def answer_times(loop: Loop, answer: Answer, requests: Requests) -> None:
    """Answers every `{"steps": n}` with the seconds of n steps, and the last loss."""
    for request in requests:
        seconds, loss = loop.run(request["steps"])
        answer({"seconds": seconds, "loss": loss})


def answer_growths(loop: Loop, memory: Memory, imported: int, answer: Answer, requests: Requests) -> None:
    """Answers every `{"steps": n}` with the memory at rest, less the `imported` bytes, and what each of n steps adds to it."""
    for request in requests:
        found = growths(memory, lambda: loop.run(1), request["steps"])
        answer({"rest_bytes": memory.in_use() - imported, "step_bytes": found})
