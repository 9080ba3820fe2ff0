"""The one place that chooses how bytes travel.

Memory that CPU workers of one machine share, where they can; else the ring on CPUs and on virtual GPUs, NCCL on physical GPUs.
Facts behind each choice (TensorFlow 2.21):

* Only the hint "nccl" on a GPU group selects NCCL; "auto" means the ring, on GPUs too.
* ReduceScatterV2 has no CPU kernel: there a reduce-scatter is an all-to-all and a local sum, which moves the same bytes.
* NCCL kernels refuse bfloat16 and int32 reductions (read in the source, not run): they are widened for the trip.
* CollectiveGatherV2 and the broadcasts have no bfloat16 kernel: bfloat16 travels there as float16 bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist import errors
from tfdist.mesh import uses_physical_gpus

# No timeout by default: TensorFlow 2.21 leaves about two sleeping threads behind for every collective that runs with one, until
# it would have expired, so that a training run of some minutes exhausts the process's threads. Within one process a missing peer
# is found while tracing (`CollectivePlan`).
DEFAULT_TIMEOUT_SECONDS = 0.0


@dataclasses.dataclass(frozen=True)
class Transport:
    """How the collectives of a set of devices travel.

    Attributes:
        hint: `communication_hint` of the collective ops, "ring" or "nccl".
        has_reduce_scatter: whether ReduceScatterV2 exists there; else a reduce-scatter is an all-to-all and a sum.
        timeout_seconds: after this long without a peer a collective fails instead of hanging; 0 waits for ever.
        chunk_bytes: a rank sends a peer at most about so much at once; larger messages are cut. None: as large as they come.
        shares_memory: whether processes of one machine meet in memory instead (see `shared_memory`, of pipelines `mailbox`).
    """

    hint: str
    has_reduce_scatter: bool
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    chunk_bytes: int | None = None
    shares_memory: bool = False

    def reduction_dtype(self, dtype: tf.DType) -> tf.DType:
        """Returns the dtype in which a reduction of `dtype` travels."""
        if self.hint == "nccl":
            return {tf.bfloat16: tf.float32, tf.int32: tf.int64}.get(dtype, dtype)
        return dtype

    def byte_dtype(self, dtype: tf.DType) -> tf.DType:
        """Returns a dtype of the same width in which `dtype` travels where bytes are only moved."""
        return {tf.bfloat16: tf.float16}.get(dtype, dtype)


RING = Transport("ring", has_reduce_scatter=False)
# Between two processes gRPC carries pieces of some MiB more than twice as fast as tens of MiB; between four, as fast or somewhat
# faster (benchmarks/transport.py, docs/notes/benchmarks.md).
RING_BETWEEN_WORKERS = Transport("ring", has_reduce_scatter=False, chunk_bytes=8 * 2**20)
MEMORY_BETWEEN_WORKERS = dataclasses.replace(RING_BETWEEN_WORKERS, shares_memory=True)
NCCL = Transport("nccl", has_reduce_scatter=True)


def choose_transport(devices: Sequence[str], implementation: str = "AUTO", is_multi_worker: bool = False) -> Transport:
    """Returns `NCCL` when every device is a whole physical GPU, else `RING`, `RING_BETWEEN_WORKERS` or `MEMORY_BETWEEN_WORKERS`.

    Args:
        devices: the devices of the job.
        implementation: what the user asks for, a name of `tf.distribute.experimental.CommunicationImplementation`.
        is_multi_worker: whether the devices belong to several processes.

    Raises:
        ValueError: NCCL is asked for, but the devices are not whole physical GPUs.
    """
    is_nccl = uses_physical_gpus(devices)
    if implementation == "NCCL" and not is_nccl:
        raise ValueError(
            errors.message(
                "`communication_options` asks for NCCL, which needs whole physical GPUs.",
                implementation=implementation,
                devices=list(devices),
                fix="Use `CommunicationImplementation.AUTO`, which takes NCCL where it can.",
            )
        )
    if is_nccl and implementation != "RING":
        return NCCL
    if not is_multi_worker:
        return RING
    on_cpus = all(tf.DeviceSpec.from_string(device).device_type == "CPU" for device in devices)
    return MEMORY_BETWEEN_WORKERS if on_cpus and implementation != "RING" else RING_BETWEEN_WORKERS
