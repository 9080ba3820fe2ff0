"""Programs that call the null GPU's driver and NCCL themselves, without TensorFlow.

python -m tests.null_gpu.raw_calls NAME
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import numpy as np

FLOAT32, SUM = 7, 0

cuda, nccl = ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL), ctypes.CDLL("libnccl.so.2")


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Device:
    """A device's stream, and memory of some float32 numbers."""

    def __init__(self, number: int):
        self.number, self.stream = number, ctypes.c_void_p()
        self.choose()
        cuda.cuStreamCreate(ctypes.byref(self.stream), 0)

    def choose(self) -> None:
        context = ctypes.c_void_p()
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), self.number)
        cuda.cuCtxSetCurrent(context)

    def put(self, values: list[float]) -> ctypes.c_void_p:
        self.choose()
        address, host = ctypes.c_uint64(), np.array(values, np.float32)
        cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(host.nbytes))
        cuda.cuMemcpyHtoD_v2(address, ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(host.nbytes))
        return ctypes.c_void_p(address.value)

    def get(self, address: ctypes.c_void_p, count: int) -> list[float]:
        self.wait()
        self.choose()
        host = np.zeros(count, np.float32)
        cuda.cuMemcpyDtoH_v2(ctypes.c_void_p(host.ctypes.data), ctypes.c_uint64(address.value), ctypes.c_size_t(host.nbytes))
        return host.tolist()

    def wait(self) -> None:
        cuda.cuStreamSynchronize(self.stream)


def communicator(devices: list[Device]) -> list[ctypes.c_void_p]:
    """Returns one communicator's handles, one per device."""
    made, name = [ctypes.c_void_p() for _ in devices], UniqueId()
    nccl.ncclGetUniqueId(ctypes.byref(name))
    nccl.ncclGroupStart()
    for rank, (device, handle) in enumerate(zip(devices, made, strict=True)):
        device.choose()
        nccl.ncclCommInitRank(ctypes.byref(handle), len(devices), name, rank)
    nccl.ncclGroupEnd()
    return made


def all_reduce(device: Device, handle: ctypes.c_void_p, count: int) -> None:
    x = device.put([1.0] * count)
    nccl.ncclAllReduce(x, x, ctypes.c_size_t(count), FLOAT32, SUM, handle, device.stream)


def moves() -> None:
    """Prints what an all-gather, a broadcast and an all-to-all of three devices bring."""
    devices = [Device(number) for number in range(3)]
    handles = communicator(devices)
    sent = [device.put([device.number, 10.0 + device.number, 20.0 + device.number]) for device in devices]
    received = [[device.put([0.0] * 9) for _ in range(3)] for device in devices]
    for device, handle, x, (gathered, broadcast, exchanged) in zip(devices, handles, sent, received, strict=True):
        nccl.ncclAllGather(x, gathered, ctypes.c_size_t(3), FLOAT32, handle, device.stream)
        nccl.ncclBroadcast(x, broadcast, ctypes.c_size_t(3), FLOAT32, 1, handle, device.stream)
        nccl.ncclGroupStart()
        for peer in range(3):
            nccl.ncclSend(ctypes.c_void_p(x.value + 4 * peer), ctypes.c_size_t(1), FLOAT32, peer, handle, device.stream)
            piece = ctypes.c_void_p(exchanged.value + 4 * peer)
            nccl.ncclRecv(piece, ctypes.c_size_t(1), FLOAT32, peer, handle, device.stream)
        nccl.ncclGroupEnd()
    for device, (gathered, broadcast, exchanged) in zip(devices, received, strict=True):
        print(device.get(gathered, 9), device.get(broadcast, 3), device.get(exchanged, 3))


def crossed() -> None:
    """Two devices of two communicators, which each device calls in an order of its own."""
    devices = [Device(number) for number in range(2)]
    pairs = [communicator(devices), communicator(devices)]
    for device in devices:
        for number in (0, 1) if device.number == 0 else (1, 0):
            all_reduce(device, pairs[number][device.number], 2 + number)
    for device in devices:
        device.wait()


def different() -> None:
    """Two devices that call a communicator with different sizes."""
    devices = [Device(number) for number in range(2)]
    handles = communicator(devices)
    for device, handle in zip(devices, handles, strict=True):
        all_reduce(device, handle, 3 + device.number)
    for device in devices:
        device.wait()


PROGRAMS: dict[str, Callable[[], None]] = {"moves": moves, "crossed": crossed, "different": different}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
