"""What a trace of TensorFlow's profiler says of some steps: what the streams of a GPU did, what the host did, and who waited.

A GPU's plane has a line per stream: kernels and copies, with begin and end. Where there is none (CPUs; a driver without CUPTI)
the host's lines are all there is: operations of TensorFlow's executor, on CPUs the computation itself, on GPUs its launches.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from benchmarks.timelines import Span, length, overlap, union

_PRODUCTS = ("MatMul", "Einsum", "Conv")  # in the types of operations
_MOST_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Event:
    """Something with a begin and an end, on a line of the trace."""

    name: str
    line: str
    span: Span


@dataclasses.dataclass(frozen=True)
class Trace:
    """Of some steps in a row.

    Attributes:
        gpu: kernels and copies of all streams of the GPUs.
        host: operations that the host's executor ran, by "name:type".
    """

    gpu: Sequence[Event]
    host: Sequence[Event]

    def figures(self, steps: int) -> dict[str, Any]:
        """Returns what a step's time went to, milliseconds of a step, or shares of it."""
        return {"steps": steps, **(self._of_gpu(steps) if self.gpu else self._of_host(steps))}

    def _of_gpu(self, steps: int) -> dict[str, Any]:
        copies = [event for event in self.gpu if _is_copy(event)]
        kernels = [event for event in self.gpu if not _is_copy(event)]
        window = _window(self.gpu)
        busy = union(event.span for event in self.gpu)
        gaps = [after[0] - before[1] for before, after in zip(busy, busy[1:], strict=False)]
        collectives = [event.span for event in self.host if ":Collective" in event.name]
        return {
            "seen": "streams of the GPU",
            "streams": sorted({event.line for event in self.gpu}),
            **_times(kernels, copies, window, steps),
            "idle_share": sum(gaps) / window,
            "gaps_per_step": len(gaps) / steps,
            "longest_gap_us": max(gaps, default=0.0),
            # The GPU has nothing to do: the share of this time in which the host is starting or running a collective.
            "idle_in_collectives_share": overlap(_between(busy), collectives) / max(sum(gaps), 1e-9),
            "kernels_per_step": len(kernels) / steps,
            "most_time": _most(kernels, steps),
            "most_copied": _most(copies, steps),
        }

    def _of_host(self, steps: int) -> dict[str, Any]:
        collectives = [event for event in self.host if ":Collective" in event.name]
        products = [event for event in self.host if any(part in event.name.rpartition(":")[2] for part in _PRODUCTS)]
        window = _window(self.host)
        busy = union(event.span for event in self.host)
        return {
            "seen": "operations of the host",
            **_times(products, collectives, window, steps),
            "idle_share": 1 - length(busy) / window,
            "most_time": _most(self.host, steps, lambda event: event.name.rpartition(":")[2]),
        }


def record(run: Callable[[], object]) -> Trace:
    """Calls `run` with the profiler on."""
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        with contextlib.ExitStack() as stack:
            stack.callback(tf.profiler.experimental.stop)
            run()
        paths = list(pathlib.Path(folder).glob("**/*.xplane.pb"))
        if not paths:
            raise RuntimeError("the profiler has written no trace")
        return read(xplane_pb2.XSpace.FromString(paths[0].read_bytes()))


def read(space: Any) -> Trace:
    """Returns what a trace has of streams and of operations."""
    gpu: list[Event] = []
    host: list[Event] = []
    for plane in space.planes:
        for event in _events(plane):
            if "GPU" in plane.name and event.line.startswith("Stream"):
                gpu.append(event)
            elif plane.name.startswith("/host:CPU") and _is_operation(event):
                host.append(event)
    return Trace(gpu, host)


def _events(plane: Any) -> Iterable[Event]:
    for line in plane.lines:
        for event in line.events:
            begin = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
            span = (begin, begin + event.duration_ps / 1e6)
            yield Event(plane.event_metadata[event.metadata_id].name, line.name, span)


def _is_operation(event: Event) -> bool:
    """Operations of functions stand as "name:Type"; what TensorFlow's own threads say of themselves has "::" in it."""
    name, _, kind = event.name.rpartition(":")
    return bool(name) and not name.endswith(":") and kind.lstrip("_").isidentifier() and not event.line.startswith("tf_data")


def _is_copy(event: Event) -> bool:
    return "memcpy" in event.name.lower()


def _window(events: Sequence[Event]) -> float:
    return max(event.span[1] for event in events) - min(event.span[0] for event in events)


def _between(busy: Sequence[Span]) -> list[Span]:
    return [(before[1], after[0]) for before, after in zip(busy, busy[1:], strict=False)]


def _times(products: Sequence[Event], messages: Sequence[Event], window: float, steps: int) -> dict[str, float]:
    computed, moved = [event.span for event in products], [event.span for event in messages]
    return {
        "step_ms": window / steps / 1e3,
        "compute_ms": length(computed) / steps / 1e3,
        "messages_ms": length(moved) / steps / 1e3,
        "hidden_ms": overlap(computed, moved) / steps / 1e3,
    }


def _most(events: Iterable[Event], steps: int, name: Callable[[Event], str] = lambda event: event.name) -> dict[str, float]:
    """Returns the names that took most time, with milliseconds a step."""
    total: dict[str, float] = collections.defaultdict(float)
    for event in events:
        total[name(event)] += (event.span[1] - event.span[0]) / steps / 1e3
    most = sorted(total.items(), key=lambda item: -item[1])[:_MOST_NAMED]
    return {name[:120]: round(milliseconds, 4) for name, milliseconds in most}
