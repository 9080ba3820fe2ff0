"""For programs that run on null GPUs: what a test tells the devices."""

from __future__ import annotations

import ctypes


def note(text: str) -> None:
    """Writes a mark to the log of this process."""
    _driver().null_gpu_note(text.encode())


def set_condition(value: bool) -> None:
    """Says what each bool or int32 that the host reads from a device is, from now on: no kernel computes it."""
    _driver().null_gpu_set_condition(int(value))


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
