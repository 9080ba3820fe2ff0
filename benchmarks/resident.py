"""How much memory of this process is resident, and its peak. Linux only: it reads /proc/self."""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib
import threading
from typing import Self

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_INTERVAL_SECONDS = 0.002

# The environment of a process whose memory is measured: what is resident is in use. Tensors come from the C library, which
# returns every freed block of 64 KiB and more (glibc would raise that), and not from the allocator that oneDNN brings.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": str(2**20), "TF_ENABLE_ONEDNN_OPTS": "0"}
# Of one whose speed is measured: freed memory stays mapped, and oneDNN is on, which it is not by default without AVX-512.
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33), "TF_ENABLE_ONEDNN_OPTS": "1"}


def resident_bytes() -> int:
    """Returns the resident set's size."""
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * _PAGE_BYTES


def give_back() -> None:
    """Collects Python's garbage and returns free memory of the C heap to the system, where the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class PeakResident:
    """The largest resident set while the `with` block runs.

        with PeakResident() as peak:
            ...
        peak.bytes

    A thread reads it every 2 ms. The kernel's own high-water mark misses nothing between two readings; it counts too,
    where the process may reset it.

    Attributes:
        bytes: the peak, after the block.
        has_high_water_mark: whether the kernel's mark could be reset, and was used.
    """

    def __enter__(self) -> Self:
        self.bytes = resident_bytes()
        self.has_high_water_mark = self._reset_high_water_mark()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self.bytes = max(self.bytes, resident_bytes())
        if self.has_high_water_mark:
            self.bytes = max(self.bytes, _high_water_mark())

    def _sample(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            self.bytes = max(self.bytes, resident_bytes())

    @staticmethod
    def _reset_high_water_mark() -> bool:
        try:
            pathlib.Path("/proc/self/clear_refs").write_text("5")
            # Where the write is accepted and ignored, the mark is still that of everything before.
            return _high_water_mark() <= resident_bytes() + 16 * 2**20
        except OSError:
            return False


def _high_water_mark() -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")
