"""How much memory of this process is resident. Linux only."""

import os


def resident_bytes():
    with open("/proc/self/statm") as stream:
        return os.sysconf("SC_PAGE_SIZE") * int(stream.read().split()[1])
