"""The GPUs of this machine and each worker's share of them. Found out without TensorFlow, which would take them."""

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
    workers: int, devices_per_worker: int | None, *, gpus: list[str], cpu: bool = False, logical_gpus: int | None = None
) -> list[dict[str, str]]:
    """Returns the variables that give each of `workers` processes devices of its own.

    `devices_per_worker` None: an equal share of `gpus`, or one CPU device where there are none. With `cpu` the GPUs are hidden.
    With `logical_gpus` every worker has one card, split in so many parts; workers share a card where there are more of them.

    Raises:
        ValueError: there are not enough GPUs. The text names the option of the command line.
    """
    if logical_gpus is not None:
        return _environments_of_parts(workers, logical_gpus, devices_per_worker, gpus, cpu)
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


def _environments_of_parts(
    workers: int, logical_gpus: int, devices_per_worker: int | None, gpus: list[str], cpu: bool
) -> list[dict[str, str]]:
    if cpu or devices_per_worker is not None:
        option = "--cpu" if cpu else "--devices-per-worker"
        raise errors.value_error(f"argument --logical-gpus: cannot be given with {option}: it splits a GPU of each worker.")
    if not gpus:
        raise errors.value_error(
            "argument --logical-gpus: there is no GPU to split.",
            logical_gpus=logical_gpus,
            fix=f"--devices-per-worker {logical_gpus} splits the CPU instead.",
        )
    sharing = -(-workers // len(gpus))
    asked = {"TFDIST_LOGICAL_GPUS": str(logical_gpus), "TFDIST_WORKERS_PER_GPU": str(sharing)}
    return [asked | {"CUDA_VISIBLE_DEVICES": gpus[rank // sharing]} for rank in range(workers)]
