"""The GPUs of this machine and each worker's share of them. Found out without TensorFlow, which would take them."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

from tfdist import errors

_DRIVER = pathlib.Path("/proc/driver/nvidia/gpus")  # a directory per GPU
_NO_GPU = "-1"


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: pathlib.Path = _DRIVER) -> list[str]:
    """Returns the ids of the GPUs that a process with this environment could use, as CUDA_VISIBLE_DEVICES spells them."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(index) for index, _ in enumerate(driver.iterdir())] if driver.is_dir() else []
    gpus = []
    for gpu in listed.split(","):
        if gpu.strip() in ("", _NO_GPU):  # CUDA ignores what follows, too
            break
        gpus.append(gpu.strip())
    return gpus


def device_environments(
    workers: int, devices_per_worker: int | None, *, gpus: list[str], cpu: bool = False
) -> list[dict[str, str]]:
    """Returns the variables that give each of `workers` processes devices of its own.

    `devices_per_worker` None: an equal share of `gpus`, or one CPU device where there are none. With `cpu` the GPUs are hidden.

    Raises:
        ValueError: there are not enough GPUs. The text names the option of the command line.
    """
    asked = {} if devices_per_worker is None else {"TFDIST_DEVICES_PER_WORKER": str(devices_per_worker)}
    if cpu:
        return [asked | {"CUDA_VISIBLE_DEVICES": _NO_GPU}] * workers
    if not gpus:
        return [asked] * workers
    if len(gpus) < workers:
        raise errors.value_error(
            f"argument --workers: every worker needs a GPU of its own, and there are {len(gpus)}.",
            workers=workers,
            fix=f"Use --workers {len(gpus)} or fewer, or --cpu to run on the CPU.",
        )
    share = devices_per_worker or len(gpus) // workers
    if share * workers > len(gpus):
        raise errors.value_error(
            f"argument --devices-per-worker: {workers} workers need {share * workers} GPUs, and there are {len(gpus)}.",
            devices_per_worker=share,
            fix=f"Use --devices-per-worker {len(gpus) // workers} or fewer, fewer workers, or --cpu to run on the CPU.",
        )
    return [asked | {"CUDA_VISIBLE_DEVICES": ",".join(gpus[rank * share : (rank + 1) * share])} for rank in range(workers)]
