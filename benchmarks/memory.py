"""The memory whose growth is measured: what is resident of this process, or what the allocators of its GPUs have given out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Protocol, Self

from benchmarks.resident import PeakResident, give_back, resident_bytes


class Peak(Protocol):
    """The most that was in use while a `with` block ran: of its end `bytes`.

    Attributes:
        bytes: the peak, after the block.
        has_high_water_mark: whether nothing can have been missed.
    """

    bytes: int
    has_high_water_mark: bool


class Memory(Protocol):
    """What of the memory is looked at."""

    def in_use(self) -> int:
        """Returns the bytes in use now."""

    def peak(self) -> contextlib.AbstractContextManager[Peak]:
        """Returns a block whose peak is measured."""


class HostMemory:
    """What is resident of this process: its ranks together."""

    def in_use(self) -> int:
        return resident_bytes()

    def peak(self) -> PeakResident:
        return PeakResident()


@dataclasses.dataclass(frozen=True)
class AllocatorMemory:
    """What the allocators of this process's devices have given out: its ranks together. They count exactly.

    Attributes:
        current: returns the bytes given out now, one number a device.
        most: the same at the peak since `reset`.
        reset: begins to count the peaks anew.
    """

    current: Callable[[], list[int]]
    most: Callable[[], list[int]]
    reset: Callable[[], None]

    def in_use(self) -> int:
        return sum(self.current())

    def peak(self) -> _AllocatorPeak:
        return _AllocatorPeak(self)


class _AllocatorPeak:
    def __init__(self, memory: AllocatorMemory):
        self._memory = memory
        self.has_high_water_mark = True

    def __enter__(self) -> Self:
        self._memory.reset()
        return self

    def __exit__(self, *exception: object) -> None:
        self.by_device = self._memory.most()
        self.bytes = sum(self.by_device)


def growths(memory: Memory, run: Callable[[], object], times: int) -> list[int]:
    """Calls `run` some times; returns for each by how much more was in use at most than right before."""
    found = []
    for _ in range(times):
        give_back()
        before = memory.in_use()
        with memory.peak() as peak:
            run()
        found.append(peak.bytes - before)
    give_back()
    return found
