"""The tasks of a job on this machine, each with a free port."""

import contextlib
import socket

from tfdist.runtime.cluster import Task


def tasks_on_free_ports(workers: int, *, chief: bool) -> tuple[Task, ...]:
    """Returns `workers` tasks, in order of rank, on ports that nobody uses now. With `chief`, the first is the chief."""
    kinds = [("chief", 0)] if chief else []
    kinds += [("worker", index) for index in range(workers - len(kinds))]
    return tuple(Task(kind, index, f"localhost:{port}") for (kind, index), port in zip(kinds, free_ports(workers), strict=True))


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
