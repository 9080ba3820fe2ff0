"""The workers of a job, and which of them this process is. Without TensorFlow, which the launcher does not need."""

import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class Task:
    """One worker process: its type ("chief" or "worker"), its index within the type, and its address "host:port"."""

    type: str
    index: int
    address: str

    @property
    def name(self) -> str:
        """The task in words, without its address: "worker 2"."""
        return f"{self.type} {self.index}"

    @property
    def device(self) -> str:
        """The task's part of a device name."""
        return f"/job:{self.type}/replica:0/task:{self.index}"

    @property
    def port(self) -> int:
        """The port in `address`."""
        return int(self.address.rpartition(":")[2])

    @property
    def host(self) -> str:
        """The host in `address`."""
        return self.address.rpartition(":")[0]

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """All workers of a job in the order of their ranks (the chief first, then the workers by index), and which one this is.

    Attributes:
        tasks: the workers.
        worker_index: the place of this process in `tasks`.
    """

    tasks: tuple[Task, ...]
    worker_index: int

    @property
    def num_workers(self) -> int:
        """Number of workers in the job."""
        return len(self.tasks)

    @property
    def task(self) -> Task:
        """This process."""
        return self.tasks[self.worker_index]

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the first, which draws initial values, writes files and hosts the coordination service."""
        return self.worker_index == 0

    @property
    def num_workers_here(self) -> int:
        """How many workers' addresses name the same host as this one's."""
        return sum(task.host == self.task.host for task in self.tasks)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The number of each worker's host: those have one number whose addresses name the same."""
        names = list(dict.fromkeys(task.host for task in self.tasks))
        return tuple(names.index(task.host) for task in self.tasks)

    def tf_config(self) -> str:
        """Returns the TF_CONFIG of this worker, which `read_cluster` reads."""
        addresses: dict[str, list[str]] = {}
        for task in self.tasks:
            addresses.setdefault(task.type, []).append(task.address)
        return json.dumps({"cluster": addresses, "task": {"type": self.task.type, "index": self.task.index}})

    def others(self) -> list[tuple[int, Task]]:
        """Returns (worker index, task) of all workers but this."""
        return [(index, task) for index, task in enumerate(self.tasks) if index != self.worker_index]
