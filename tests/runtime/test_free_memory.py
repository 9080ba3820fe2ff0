"""Free memory of the C heap goes back to the system."""

import ctypes
import sys

import pytest
from resident import resident_bytes

from tfdist.runtime import give_back_free_memory

BLOCK, COUNT = 2000, 100_000  # 200 MB: other threads of the process may take some meanwhile


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_free_between_blocks_in_use_is_given_back():
    c = ctypes.CDLL(None)
    if not hasattr(c, "malloc_trim"):
        pytest.skip("not glibc")
    c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [c.malloc(BLOCK) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[:-1]:  # the heap cannot shrink below the last
        c.free(block)
    before = resident_bytes()
    give_back_free_memory()
    assert before - resident_bytes() > BLOCK * COUNT * 0.9
    c.free(blocks[-1])
