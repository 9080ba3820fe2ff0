"""The workers of a job find each other, before TensorFlow's servers start.

TensorFlow would wait for missing workers itself, but for ever, deaf to signals and without a word. So each worker first checks in
with the chief, at the addresses that the servers take over afterwards:

    worker 1   "tfdist 1"  ──▶  chief
               ◀──  "go"                when all have checked in
               ◀──  "no worker 2 (host:port)"    to those present, when the time is over
"""

from __future__ import annotations

import contextlib
import select
import socket
import time

from tfdist import errors
from tfdist.runtime.cluster import Cluster, Task

_POLL_SECONDS = 0.2


def wait_for_workers(cluster: Cluster, timeout_seconds: float) -> None:
    """Returns when all workers of `cluster` have been started.

    Raises:
        RuntimeError: this machine already uses the port at which this worker is to be reached.
        TimeoutError: workers are missing after `timeout_seconds`; it names them.
    """
    end = time.monotonic() + timeout_seconds
    with _held_port(cluster.task) as listener:
        if cluster.is_chief:
            _gather(cluster, listener, end)
        else:
            _check_in(cluster, end)


def _held_port(task: Task) -> socket.socket:
    try:
        return socket.create_server(("", task.port), backlog=1024)
    except OSError as error:
        raise errors.runtime_error(
            f"{task} cannot start: port {task.port}, which TF_CONFIG gives it, cannot be used ({error.strerror}).",
            fix="End what uses it (a worker of an earlier run?), or choose another port for this task, on every worker.",
        ) from error


def _gather(cluster: Cluster, listener: socket.socket, end: float) -> None:
    """The chief: lets everybody go when all are there."""
    present: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        while len(present) < cluster.num_workers - 1:
            if time.monotonic() > end:
                missing = ", ".join(str(task) for index, task in cluster.others() if index not in present)
                _tell(present, f"no {missing}")
                raise TimeoutError(f"{missing} did not come")
            for ready in select.select([listener, *present.values()], [], [], _POLL_SECONDS)[0]:
                if ready is listener:
                    connection = stack.enter_context(listener.accept()[0])
                    index = _received_index(connection)
                    if index is not None and 0 < index < cluster.num_workers:
                        present[index] = connection
                else:  # who has checked in is silent, unless it has ended
                    present = {index: connection for index, connection in present.items() if connection is not ready}
        _tell(present, "go")


def _received_index(connection: socket.socket) -> int | None:
    connection.settimeout(2.0)
    with contextlib.suppress(OSError, ValueError):
        name, _, index = connection.recv(64).decode("ascii").strip().partition(" ")
        return int(index) if name == "tfdist" else None
    return None  # not one of us


def _tell(present: dict[int, socket.socket], text: str) -> None:
    for connection in present.values():
        with contextlib.suppress(OSError):
            connection.sendall(f"{text}\n".encode())


def _check_in(cluster: Cluster, end: float) -> None:
    """Another worker: checks in with the chief and waits for its word."""
    chief = cluster.tasks[0]
    host, reason = chief.address.rpartition(":")[0].strip("[]"), "it has not answered"
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, chief.port), min(left, 5.0)) as connection:
                connection.sendall(f"tfdist {cluster.worker_index}\n".encode())
                # The chief has started before or after: it may give up, and say who is missing, a little later than this.
                connection.settimeout(left + 2.0)
                answer = connection.makefile(encoding="utf-8", errors="replace").readline().strip()
            if answer == "go":
                return
            if answer.startswith("no "):
                raise TimeoutError(f"{answer.removeprefix('no ')} did not come")
            reason = "what listens there is not the chief of this job" if answer else "it has closed the connection"
        except TimeoutError as error:
            if "did not come" in str(error):
                raise
            reason = "it has not answered"
        except OSError as error:  # not started yet, or its name is not known yet
            reason = error.strerror or str(error)
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(f"{chief} cannot be reached: {reason}")
