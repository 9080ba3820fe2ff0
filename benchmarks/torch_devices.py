"""The device of a rank of PyTorch, and its memory: what `benchmarks.devices` is to TensorFlow."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.cases import Case
from benchmarks.memory import AllocatorMemory, HostMemory, Memory


def join(case: Case) -> None:
    """Makes this process a rank of the job. Several ranks on one GPU meet over gloo, since NCCL refuses them."""
    if not case.logical_gpus:
        dist.init_process_group("gloo")
        return
    torch.set_float32_matmul_precision("high")  # TensorFloat-32, as TensorFlow multiplies
    device = device_of(case)
    alone = case.num_ranks == 1
    dist.init_process_group("nccl" if alone else "cuda:gloo,cpu:gloo", device_id=device if alone else None)


def device_of(case: Case) -> torch.device:
    return torch.device("cuda", 0) if case.logical_gpus else torch.device("cpu")


def memory_of(case: Case) -> Memory:
    """Returns the memory of this rank: what PyTorch's allocator has given out of the GPU, or what is resident."""
    if not case.logical_gpus:
        return HostMemory()
    return AllocatorMemory(
        lambda: [torch.cuda.memory_allocated()],
        lambda: [torch.cuda.max_memory_allocated()],
        torch.cuda.reset_peak_memory_stats,
    )


def wait(case: Case) -> None:
    """Waits until the device has done all that it was given."""
    if case.logical_gpus:
        torch.cuda.synchronize()
