"""What the checks of one process share: the devices, and strategies over them."""

from __future__ import annotations

import functools
from typing import Any

from tfdist import errors
from tfdist.doctor.check import LeftOutError
from tfdist.mesh import default_devices, resolve_devices, use_logical_cpus, use_logical_gpus, worker_devices
from tfdist.runtime import read_cluster
from tfdist.strategy import MultiWorkerShardedStrategy, ShardedStrategy

# Without a GPU, and without a wish: as few as show that devices talk.
_LOGICAL_CPUS = 2


class Session:
    """The devices to be examined: of the workers of TF_CONFIG, else of this machine.

    Args:
        devices: how many, in a job of one worker: the first GPUs, or logical CPUs where there is none. None: all GPUs, or two
            CPUs.
        logical_gpus: in how many parts to split one GPU instead; None: none.
        is_quick: whether checks are to be short.
        timeout_seconds: how long to wait for other workers.

    Nothing is made before it is asked for. Who uses TensorFlow asks for the devices first: a worker's servers must start before.
    """

    def __init__(self, devices: int | None, is_quick: bool, timeout_seconds: float, logical_gpus: int | None = None):
        self.is_quick = is_quick
        self.cluster = read_cluster()
        self._timeout_seconds = timeout_seconds
        self._number = devices
        self._logical_gpus = logical_gpus

    @functools.cached_property
    def base(self) -> Any:
        """A strategy over all devices. Raises ValueError when there are fewer than asked for."""
        return self.strategy()

    @functools.cached_property
    def _devices(self) -> list[str]:
        if self._logical_gpus:
            return use_logical_gpus(self._logical_gpus)
        kind, present = worker_devices()
        if kind == "CPU" and present == 1:
            return use_logical_cpus(self._number or _LOGICAL_CPUS)
        names = default_devices()
        if self._number is not None and self._number > len(names):
            raise errors.value_error(f"`--devices` asks for more than there are: {len(names)} {kind}s.", devices=self._number)
        return list(resolve_devices(names[: self._number]))

    def strategy(self, **settings: Any) -> Any:
        """Returns a new strategy over the devices, with these settings."""
        if self.cluster is None:
            return ShardedStrategy(self._devices, **settings)
        # A check that takes too long is ended from outside, which tells more than a worker that has waited for it.
        return MultiWorkerShardedStrategy(
            rendezvous_timeout_seconds=self._timeout_seconds, step_timeout_seconds=2 * self._timeout_seconds, **settings
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

    def meet(self) -> None:
        """Waits until all workers are here: behind a check, so that nobody is already in the next one when it goes wrong."""
        if self.cluster is not None and "base" in vars(self):
            self.base.barrier("doctor: the end of a check")

    def needs_several(self, what: str, divisor: int = 1) -> None:
        """Raises LeftOutError where there is one device only, or `divisor` does not divide their number."""
        if self.world_size == 1:
            raise LeftOutError(f"there is one device, and {what} needs several")
        if self.world_size % divisor:
            raise LeftOutError(f"{what} needs a number of devices that {divisor} divides, and there are {self.world_size}")
