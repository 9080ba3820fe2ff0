"""The doctors of all workers of a job, which go from check to check together.

Each worker has a doctor, whose checks run in processes of their own; these form jobs of their own, at the addresses of TF_CONFIG.
The doctors are connected beside that, as workers are while a job runs (`runtime.rendezvous`), from beginning to end.
"""

import time
from typing import Any

from tfdist.runtime import Cluster
from tfdist.runtime.peers import Peers
from tfdist.runtime.rendezvous import WorkerFailedError, wait_for_workers

_LOOK_SECONDS = 0.2


class WorkerGoneError(Exception):
    """Another worker's doctor has ended, or does not answer; the text names it."""


class Workers:
    """The doctors of a job; of one worker where `cluster` is None.

    Raises:
        RuntimeError: this worker's port is in use.
        TimeoutError: workers are missing after `timeout_seconds`; it names them.
        WorkerGoneError: a worker has ended meanwhile.
    """

    def __init__(self, cluster: Cluster | None, timeout_seconds: float):
        self._cluster = cluster
        try:
            self._peers = wait_for_workers(cluster, timeout_seconds) if cluster else Peers()
        except WorkerFailedError as error:
            raise WorkerGoneError(f"{cluster.tasks[error.failure.worker_index]} {error.failure.what}") from None
        self._heard: dict[int, list[Any]] = {index: [] for index, _ in cluster.others()} if cluster else {}

    def gather(self, value: Any, timeout_seconds: float) -> list[Any]:
        """Returns every worker's `value`, what JSON can carry, in worker order; all workers call it at once.

        Raises:
            WorkerGoneError: a worker has ended, or does not call it within `timeout_seconds`.
        """
        self._peers.tell({"value": value})
        end = time.monotonic() + timeout_seconds
        while silent := [index for index, heard in self._heard.items() if not heard]:
            if time.monotonic() > end:
                raise WorkerGoneError(f"{self._cluster.tasks[silent[0]]} has not answered for {timeout_seconds:.0f} s")
            for index, word in self._peers.listen(_LOOK_SECONDS):
                if word is None and not self._heard[index]:
                    raise WorkerGoneError(f"{self._cluster.tasks[index]} has ended")
                if word is not None:
                    self._heard[index].append(word["value"])
        values = {index: heard.pop(0) for index, heard in self._heard.items()}
        return [values.get(index, value) for index in range(1 + len(values))]

    def close(self) -> None:
        """Lets go of the others."""
        self._peers.close()
