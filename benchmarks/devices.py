"""The devices that the ranks of a benchmark are, and their memory: logical CPUs, or parts of one GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

import tfdist
from benchmarks.cases import Case
from benchmarks.memory import AllocatorMemory, HostMemory, Memory
from tfdist.mesh import worker_devices
from tfdist.mesh.device_details import allocated_bytes, peak_bytes, reset_peak_bytes

T = TypeVar("T")


def take_devices(n: int, logical_gpus: int = 0) -> list[str]:
    """Returns the names of `n` devices: logical CPUs, all there are, or the first of `logical_gpus` parts of one GPU.

    Call it before TensorFlow has started. Where processes share the GPU, TFDIST_WORKERS_PER_GPU says how many.

    Raises:
        ValueError: there are fewer parts than `n`, or the GPU is too small for them.
        RuntimeError: there is no GPU, or TensorFlow has started.
    """
    if not logical_gpus:
        tf.config.set_visible_devices([], "GPU")  # else what belongs to no rank would run there
        return tfdist.use_logical_cpus(n)
    if n > logical_gpus:
        raise ValueError(f"`--logical-gpus` must be at least the number of ranks, {n}. Received: {logical_gpus}")
    os.environ["TFDIST_LOGICAL_GPUS"] = str(logical_gpus)  # as the launcher asks for them
    worker_devices()
    return [f"GPU:{index}" for index in range(n)]


def memory_of(devices: Sequence[str]) -> Memory:
    """Returns the memory of `devices`: of GPUs what their allocators count, of CPUs what is resident of this process."""
    return allocators_of(devices) if is_gpu(devices) else HostMemory()


def allocators_of(devices: Sequence[str]) -> AllocatorMemory:
    """Returns the tensors' memory of `devices`. All logical CPUs of a process share one allocator, which counts once."""
    counted = list(devices) if is_gpu(devices) else ["CPU:0"]

    def reset() -> None:
        for device in counted:
            reset_peak_bytes(device)

    return AllocatorMemory(
        lambda: [allocated_bytes(device) for device in counted], lambda: [peak_bytes(device) for device in counted], reset
    )


def wait() -> None:
    """Waits until this process's devices have done all that they were given.

    A worker of a job waits for nothing: TensorFlow would ask the devices of the others too. There the value of the loss tells.
    """
    if "TF_CONFIG" not in os.environ:
        tf.test.experimental.sync_devices()


def own_devices(case: Case) -> list[str]:
    """Returns the names of the devices that are this process's ranks of a case, once it has taken them."""
    return [f"{'GPU' if case.logical_gpus else 'CPU'}:{index}" for index in range(case.num_ranks // case.num_processes)]


def tensor_growth(devices: Sequence[str], run: Callable[[], T]) -> tuple[int | None, T]:
    """Calls `run`; returns by how much its tensors exceed those before at most (None: nobody counts), and its value."""
    memory = allocators_of(devices)
    try:
        before = memory.in_use()
    except ValueError:
        return None, run()
    with memory.peak() as peak:
        result = run()
    return peak.bytes - before, result


def is_gpu(devices: Sequence[str]) -> bool:
    return "GPU" in devices[0]
