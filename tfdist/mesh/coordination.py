"""Words between workers outside the training step: TensorFlow's coordination service, a key-value store that the chief hosts.

Private names of TensorFlow: the eager context's methods around the service. A put or get costs about a millisecond.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from tfdist import errors
from tfdist.mesh.cluster import Cluster, Task

# A worker whose process is gone is noticed by a broken connection; one whose machine is gone, after this long.
HEARTBEAT_TIMEOUT_SECONDS = 10
# How long one blocking read of the store lasts, before the waiting worker looks up.
_POLL_SECONDS = 2.0


def is_started() -> bool:
    """Whether this process already runs as a worker, for an earlier strategy."""
    return context.context()._collective_ops_server_def is not None


def configure(cluster: Cluster, rendezvous_timeout_seconds: float) -> None:
    """Chooses the coordination service's settings; to be called before the server starts.

    Raises:
        RuntimeError: TensorFlow is already initialised, which is too late to make this process a worker.
    """
    here = context.context()
    if here._initialized:
        raise RuntimeError(
            errors.message(
                "TensorFlow is already initialised in this process, too late to make it a worker of the cluster.",
                fix="Make the strategy first: before any tensor, variable, dataset or list of logical devices.",
            )
        )
    jobs = {}
    for task in cluster.tasks:
        jobs[task.type] = jobs.get(task.type, 0) + 1
    here.configure_coordination_service(
        service_type="standalone",
        service_leader=cluster.tasks[0].device,
        cluster_register_timeout_in_ms=int(1000 * rendezvous_timeout_seconds),
        heartbeat_timeout_in_ms=1000 * HEARTBEAT_TIMEOUT_SECONDS,
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=name, num_tasks=number) for name, number in jobs.items()
        ],
    )


class Coordination:
    """The job's key-value store, as one worker sees it.

    A key is written once; `prefix` keeps the strategies of a process apart.

    Args:
        cluster: the workers.
        prefix: put before every key.
        check: called now and then while this worker waits; raises when waiting has become pointless.
    """

    def __init__(self, cluster: Cluster, prefix: str, check: Callable[[], None] = lambda: None):
        self.cluster = cluster
        self.check = check
        self._prefix = f"tfdist/{prefix}"
        self._serials: dict[str, itertools.count] = {}

    def put(self, key: str, value: str) -> bool:
        """Writes `value`; returns False, and changes nothing, when the key has been written."""
        try:
            context.context().set_config_key_value(f"{self._prefix}/{key}", value)
        except tf.errors.AlreadyExistsError:
            return False
        return True

    def poll(self, key: str, seconds: float) -> str | None:
        """Returns the value of `key`, None when nobody has written it within `seconds`."""
        try:
            return context.context().get_config_key_value(f"{self._prefix}/{key}", max(1, int(1000 * seconds)))
        except tf.errors.DeadlineExceededError:
            return None

    def get(self, key: str, timeout_seconds: float) -> str:
        """Returns the value of `key`, waiting for it.

        Raises:
            TimeoutError: nobody has written it within `timeout_seconds`.
        """
        end = time.monotonic() + timeout_seconds
        while (left := end - time.monotonic()) > 0:
            value = self.poll(key, min(left, _POLL_SECONDS))
            if value is not None:
                return value
            self.check()
        raise TimeoutError(f"{key!r} was not written within {timeout_seconds:g} s")

    def exchange(self, key: str, value: str, timeout_seconds: float) -> list[str]:
        """Gives every worker the `value` of every worker, in worker order.

        Raises:
            TimeoutError: it names the workers that have not called it with `key` within `timeout_seconds`.
        """
        self.put(f"{key}/{self.cluster.worker_index}", value)
        end = time.monotonic() + timeout_seconds
        values = {self.cluster.worker_index: value}
        for index, _ in self.cluster.others():
            with contextlib.suppress(TimeoutError):
                values[index] = self.get(f"{key}/{index}", max(end - time.monotonic(), 0.01))
        missing = [str(task) for index, task in enumerate(self.cluster.tasks) if index not in values]
        if missing:
            raise TimeoutError(f"no answer within {timeout_seconds:g} s from {', '.join(missing)}")
        return [values[index] for index in range(self.cluster.num_workers)]

    def serial(self, name: str) -> str:
        """Returns `name` with the number of times that this has been called for it: a fresh key, the same on every worker."""
        return f"{name}/{next(self._serials.setdefault(name, itertools.count()))}"


def abort_collectives(message: str) -> None:
    """Makes every collective of this process that runs, or will run, fail with `message`."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def is_reachable(task: Task, timeout_seconds: float = 2.0) -> bool:
    """Whether the process of `task` answers, and is the one that this process has talked to before."""
    try:
        context.context().check_collective_ops_peer_health(task.device, int(1000 * timeout_seconds))
    except tf.errors.OpError:
        return False
    return True


def seed_if_unseeded(seed: int) -> None:
    """Sets TensorFlow's global random seed, unless the program has set one."""
    if context.global_seed() is None:
        tf.random.set_seed(seed)
