"""The one place that chooses how bytes travel, when a strategy is made.

NCCL between whole physical GPUs; else TensorFlow's ring, in pieces between processes. CPU workers that turn out to be on one
machine may then reach each other in another way (`same_host`), unless the user asks for the ring.
"""

from collections.abc import Sequence

from tfdist import errors
from tfdist.collectives.transports.chunked import Chunked
from tfdist.collectives.transports.kernels import NCCL, RING
from tfdist.collectives.transports.transport import Transport
from tfdist.mesh import uses_physical_gpus

RING_BETWEEN_WORKERS = Chunked(chunk_bytes=2 * 2**20)


def choose_transport(devices: Sequence[str], implementation: str = "AUTO", is_multi_worker: bool = False) -> Transport:
    """Returns `NCCL` when every device is a whole physical GPU, else `RING`, between workers in pieces.

    Args:
        devices: the devices of the job.
        implementation: what the user asks for, a name of `tf.distribute.experimental.CommunicationImplementation`.
        is_multi_worker: whether the devices belong to several processes.

    Raises:
        ValueError: NCCL is asked for, but the devices are not whole physical GPUs.
    """
    is_nccl = uses_physical_gpus(devices)
    if implementation == "NCCL" and not is_nccl:
        raise errors.value_error(
            "`communication_options` asks for NCCL, which needs whole physical GPUs.",
            implementation=implementation,
            devices=list(devices),
            fix="Use `CommunicationImplementation.AUTO`, which takes NCCL where it can.",
        )
    if is_nccl and implementation != "RING":
        return NCCL
    return RING_BETWEEN_WORKERS if is_multi_worker else RING
