"""Common to the checks of one process: the devices, and strategies over them."""

import dataclasses
import functools
from typing import Any

from tfdist import errors
from tfdist.mesh import default_devices, resolve_devices, use_logical_cpus, use_logical_gpus, worker_devices
from tfdist.runtime import Cluster, read_cluster
from tfdist.strategy import MultiWorkerShardedStrategy, ShardedStrategy
from tfdist.tools.doctor.check import LeftOutError

# Without a GPU, and without a wish: as few as show that devices talk.
_LOGICAL_CPUS = 2


@dataclasses.dataclass(eq=False)
class Session:
    """The devices to be examined: of the workers of TF_CONFIG, else of this machine.

    Nothing is made before it is asked for. Who uses TensorFlow asks for the devices first: a worker's servers must start before.
    """

    # How many, in a job of one worker: the first GPUs, or logical CPUs where there is none. None: all GPUs, or two CPUs.
    number: int | None
    is_quick: bool  # whether checks are to be short
    timeout_seconds: float  # how long to wait for other workers
    logical_gpus: int | None = None  # in how many parts to split one GPU instead; None: none

    @functools.cached_property
    def cluster(self) -> Cluster | None:
        return read_cluster()

    @functools.cached_property
    def base(self) -> Any:
        """A strategy over all devices. Raises ValueError when there are fewer than asked for."""
        return self.strategy()

    @functools.cached_property
    def _devices(self) -> list[str]:
        if self.logical_gpus:
            return use_logical_gpus(self.logical_gpus)
        kind, present = worker_devices()
        if kind == "CPU" and present == 1:
            return use_logical_cpus(self.number or _LOGICAL_CPUS)
        names = default_devices()
        if self.number is not None and self.number > len(names):
            raise errors.value_error(f"`--devices` asks for more than there are: {len(names)} {kind}s.", devices=self.number)
        return list(resolve_devices(names[: self.number]))

    def strategy(self, **settings: Any) -> Any:
        """Returns a new strategy over the devices, with these settings."""
        if self.cluster is None:
            return ShardedStrategy(self._devices, **settings)
        # A check that takes too long is ended from outside, which tells more than a worker that has waited for it.
        return MultiWorkerShardedStrategy(
            rendezvous_timeout_seconds=self.timeout_seconds, step_timeout_seconds=2 * self.timeout_seconds, **settings
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of all workers, in rank order."""
        return self.base.mesh.devices

    @property
    def local_devices(self) -> tuple[str, ...]:
        """This worker's."""
        return tuple(self.devices[rank] for rank in self.base.extended.communicator.local_ranks)

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def has_gpus(self) -> bool:
        return "GPU" in self.devices[0]

    def needs_several(self, what: str, divisor: int = 1) -> None:
        """Raises LeftOutError where there is one device only, or `divisor` does not divide their number."""
        if self.world_size == 1:
            raise LeftOutError(f"there is one device, and {what} needs several")
        if self.world_size % divisor:
            raise LeftOutError(f"{what} needs a number of devices that {divisor} divides, and there are {self.world_size}")
