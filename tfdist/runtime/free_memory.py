"""Memory of the C heap that nobody uses and that the system does not get by itself."""

import ctypes
import sys


def give_back_free_memory() -> None:
    """Returns what is free within the C heap to the system, where the C library can (glibc).

    It returns the end of a heap by itself, not what is free between blocks in use: tracing and optimizing a graph leave tens of
    megabytes of that.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
