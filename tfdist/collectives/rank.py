"""Which rank a program is of: its place in the mesh, its device, its groups."""

import contextlib

import tensorflow as tf

from tfdist.collectives.communicator import Carrier, Communicator, host_of
from tfdist.collectives.plan import Ranks
from tfdist.mesh import are_cpus


class Rank:
    """One rank of this process.

    Attributes:
        is_on_cpu: whether its device is one.
    """

    def __init__(self, communicator: Communicator, rank: int):
        self.communicator = communicator
        self.mesh = communicator.mesh
        self.rank = rank
        self.local_index = communicator.local_ranks.index(rank)
        self.device = self.mesh.devices[rank]
        self.is_on_cpu = are_cpus([self.device])

    def group_ranks(self, mesh_axis: str) -> tuple[int, ...]:
        """Returns the ranks of this rank's group along `mesh_axis`."""
        return self.mesh.group_ranks(mesh_axis, self.rank)

    def transport_of(self, ranks: Ranks) -> Carrier:
        """Returns how the collectives of the group of `ranks` travel."""
        return self.communicator.transport_of(ranks)

    def token(self) -> tf.Tensor:
        """Returns the resource handle on which the rank's collectives are chained."""
        return self.communicator.token(self.rank)

    def on_host(self) -> contextlib.AbstractContextManager[None]:
        """Places arithmetic with sizes on the host, where a GPU's rank has them: on the GPU each step of it would be a kernel."""
        return contextlib.nullcontext() if self.is_on_cpu else tf.device(host_of(self.device))
