"""The tasks of a job, where each listens, and the TF_CONFIG that tells a task so."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
from typing import Self


@dataclasses.dataclass(frozen=True)
class Task:
    """One process of the job. `kind` is "chief" or "worker"; `index` counts within the kind."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """All tasks of one attempt, in order of rank, and the port of each on this machine."""

    tasks: tuple[Task, ...]
    ports: tuple[int, ...]

    @classmethod
    def on_free_ports(cls, workers: int, *, chief: bool) -> Self:
        """Returns a cluster of `workers` processes on ports that nobody uses now. With `chief`, the first is the chief."""
        chiefs = [Task("chief", 0)] if chief else []
        tasks = (*chiefs, *(Task("worker", index) for index in range(workers - len(chiefs))))
        return cls(tasks, free_ports(workers))

    def tf_config(self, task: Task) -> str:
        """Returns the JSON that `tf.distribute` reads from the environment of `task`."""
        addresses: dict[str, list[str]] = {}
        for other, port in zip(self.tasks, self.ports, strict=True):
            addresses.setdefault(other.kind, []).append(f"localhost:{port}")
        return json.dumps({"cluster": addresses, "task": {"type": task.kind, "index": task.index}})


def free_ports(n: int) -> tuple[int, ...]:
    """Returns `n` distinct ports that are free on every interface.

    They are free when this returns, not reserved: the workers bind them once TensorFlow is loaded.
    """
    with contextlib.ExitStack() as stack:
        # All are held open until the last is found: the system would give a closed one out again.
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for held in sockets:
            held.bind(("", 0))
        return tuple(held.getsockname()[1] for held in sockets)
