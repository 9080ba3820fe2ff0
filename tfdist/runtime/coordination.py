"""What workers tell each other outside of steps: TensorFlow's coordination service, a key-value store that the chief hosts.

Private names of TensorFlow: the eager context's methods around the service. A put or get costs about a millisecond.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import random_seed

from tfdist import errors
from tfdist.runtime.cluster import Cluster, Task

# A worker whose process is gone is noticed by a broken connection; one whose machine is gone, after this long.
HEARTBEAT_TIMEOUT_SECONDS = 10
# How long one blocking read of the store lasts, before the waiting worker looks up.
_POLL_SECONDS = 2.0

_SAME_PROGRAM = (
    "Every worker must build the same model, optimizer and steps, in the same order: look for code that depends on the worker, "
    "and for different versions of the program or its settings."
)


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
        raise errors.runtime_error(
            "TensorFlow is already initialised in this process, too late to make it a worker of the cluster.",
            fix="Make the strategy first: before any tensor, variable, dataset or list of logical devices.",
        )
    jobs = collections.Counter(task.type for task in cluster.tasks)
    here.configure_coordination_service(
        service_type="standalone",
        service_leader=cluster.tasks[0].device,
        cluster_register_timeout_in_ms=int(1000 * rendezvous_timeout_seconds),
        heartbeat_timeout_in_ms=1000 * HEARTBEAT_TIMEOUT_SECONDS,
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name=name, num_tasks=number) for name, number in jobs.items()],
    )


@contextlib.contextmanager
def program_gets_sigterm() -> Iterator[None]:
    """Starts TensorFlow's servers inside, and afterwards SIGTERM ends this process, or does what the program wants, as before.

    They would keep it to themselves, as a notice of preemption that nobody asks for: `kill` would do nothing.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Python lets only the main thread set it; None: not set by Python, and unknown to it.
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


class Coordination:
    """The job's key-value store, as one worker sees it.

    A key is written once; `prefix`, put before every key, keeps the strategies of a process apart.

    Args:
        check: called now and then while this worker waits; raises when waiting has become pointless. None: nothing to check.
        report: called with the message of an error that ends the job, before it is raised. None: nobody to tell.
    """

    def __init__(
        self,
        cluster: Cluster,
        prefix: str,
        check: Callable[[], None] | None = None,
        report: Callable[[str], None] | None = None,
    ):
        self.cluster = cluster
        self._check = check or (lambda: None)
        self._report = report or (lambda _: None)
        self._prefix = f"tfdist/{prefix}"
        self._meetings = itertools.count()

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
            self._check()
        raise TimeoutError(f"{key!r} was not written within {timeout_seconds:g} s")

    def all_gather(self, key: str, value: Any, timeout_seconds: float) -> list[Any]:
        """Gives every worker the `value` of every worker, in worker order: what JSON can carry.

        Raises:
            TimeoutError: it names the workers that have not called it with `key` within `timeout_seconds`.
        """
        self.put(f"{key}/{self.cluster.worker_index}", json.dumps(value))
        return self._values(key, range(self.cluster.num_workers), timeout_seconds)

    def _values(self, key: str, workers: Iterable[int], timeout_seconds: float) -> list[Any]:
        end = time.monotonic() + timeout_seconds
        values = {}
        for index in workers:
            with contextlib.suppress(TimeoutError):
                values[index] = self.get(f"{key}/{index}", max(end - time.monotonic(), 0.01))
        missing = [str(self.cluster.tasks[index]) for index in workers if index not in values]
        if missing:
            raise TimeoutError(f"no answer within {timeout_seconds:g} s from {', '.join(missing)}")
        return [json.loads(value) for value in values.values()]

    def meet(self, what: str, value: str, timeout_seconds: float, *, with_chief_only: bool = False) -> list[str]:
        """Exchanges values at a point of the program that every worker must reach, in the same order as all such points.

        Args:
            what: names the kind of point ("step", "variable").
            with_chief_only: compare with the chief only, who waits for nobody: enough where what follows makes them wait.

        Returns:
            The values of all workers, in worker order; with `with_chief_only` the chief's alone.

        Raises:
            RuntimeError: another worker is at a point of another kind, or does not come: the workers run different programs.
        """
        here = self.cluster.worker_index
        key = f"meeting/{next(self._meetings)}"
        self.put(f"{key}/{here}", json.dumps([what, value]))
        try:
            answers = self._values(key, [0] if with_chief_only else range(self.cluster.num_workers), timeout_seconds)
        except TimeoutError as error:
            self.fail(
                f"{self.cluster.task} is at a point where all workers must meet, {_pointed(what, value)}, but there was {error}.",
                fix="Every worker must call `fit`, `evaluate`, `predict`, `save` and the steps of a custom loop alike: look for "
                "code that only one worker runs, such as `if is_chief: model.evaluate(...)`.",
            )
        values = []
        for index, (theirs, their_value) in enumerate(answers):
            if theirs != what:
                self.fail(
                    f"Workers run different programs: {self.cluster.task} is at {_pointed(what, value)}, when "
                    f"{self.cluster.tasks[index]} is at {_pointed(theirs, their_value)}."
                )
            values.append(their_value)
        return values

    def fail(self, expected: str, *, fix: str = _SAME_PROGRAM) -> NoReturn:
        """Raises RuntimeError with this text, as `errors.message`, after telling the other workers: the job cannot go on."""
        message = errors.message(expected, fix=fix)
        self._report(message)
        raise RuntimeError(message)


def _pointed(what: str, value: str) -> str:
    return f"{what} {value}" if 0 < len(value) < 100 else what


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


def seed_if_unseeded() -> None:
    """Sets TensorFlow's global random seed, unless the program has set one, so that all workers draw alike.

    It is the seed that TensorFlow takes where an operation has a seed and the program has none: what was seeded stays as it was.
    """
    if context.global_seed() is None:
        tf.random.set_seed(random_seed.DEFAULT_GRAPH_SEED)
