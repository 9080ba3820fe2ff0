"""Notices a worker that was stopped alone (SIGSTOP, which it cannot see), so that the launcher can wake it.

The others wait for it, and end after `peer_timeout_seconds`; or they have ended already, and the job would stay for ever. When
all workers that are left are stopped and none has ended, somebody has paused the job, and it stays paused.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.launch.worker import Worker

LOOK_SECONDS = 1.0  # between two looks
WAKE_LOOKS = 20  # in a row: a launcher that was stopped itself, with its workers, does not count the time


class Stops:
    """How often in a row each worker was seen stopped."""

    def __init__(self) -> None:
        self._seen: dict[Worker, int] = {}

    def overdue(self, workers: Sequence[Worker]) -> list[Worker]:
        """Looks at all `workers` of a job; returns those that were stopped for too long."""
        stopped = [worker for worker in workers if worker.exit_code is None and worker.is_stopped]
        is_paused = len(stopped) == len(workers)
        self._seen = {} if is_paused else {worker: self._seen.get(worker, 0) + 1 for worker in stopped}
        overdue = [worker for worker, looks in self._seen.items() if looks >= WAKE_LOOKS]
        for worker in overdue:
            del self._seen[worker]
        return overdue
