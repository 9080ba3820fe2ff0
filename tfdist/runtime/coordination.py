"""Words between workers outside of steps: TensorFlow's coordination service, a key-value store that the chief hosts.

Private names of TensorFlow: the eager context's methods around the service. A put or get costs about a millisecond.
"""

import collections
import contextlib
import contextvars
import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import errors_impl, random_seed

from tfdist import errors
from tfdist.runtime.cluster import Cluster, Task

# Returns the words for how the value of worker `index` differs from this worker's; "" if it does not.
Difference = Callable[[int, Any], str]

# TensorFlow's service has heartbeats of its own, at whose end it breaks collectives off, in words that name nobody. The failure
# watch is to be first.
_SERVICE_PATIENCE = 3.0
_LEAST_PATIENCE_SECONDS = 30.0
_starts_servers: contextvars.ContextVar[bool] = contextvars.ContextVar("tfdist starts TensorFlow's servers", default=False)
_LIBRARY = os.path.join(tf.sysconfig.get_lib(), "libtensorflow_cc.so.2")
# How long one blocking read of the store lasts, before the waiting worker looks up.
_POLL_SECONDS = 2.0
_HEALTH_MILLISECONDS = 2000
# Values whose counterparts never come, since another worker has read less far ahead, are forgotten at last.
_MOST_COMPARED = 4096

_SAME_PROGRAM = (
    "Every worker must build the same model, optimizer and steps, in the same order: look for code that depends on the worker, "
    "and for different versions of the program or its settings."
)


def is_started() -> bool:
    """Whether this process already runs as a worker, for an earlier strategy."""
    return context.context()._collective_ops_server_def is not None


def configure(cluster: Cluster, rendezvous_timeout_seconds: float, peer_timeout_seconds: float) -> None:
    """Chooses the coordination service's settings; to be called before the server starts.

    Raises:
        RuntimeError: TensorFlow is already initialised, which is too late to make this process a worker.
    """
    here = context.context()
    if here._initialized:
        raise errors.runtime_error(
            "TensorFlow is already initialised in this process, too late to make it a worker of the cluster.",
            fix="Make the strategy first: before any tensor, variable, dataset, plan (`tfdist.plan`) or list of logical devices.",
        )
    jobs = collections.Counter(task.type for task in cluster.tasks)
    here.configure_coordination_service(
        service_type="standalone",
        service_leader=cluster.tasks[0].device,
        cluster_register_timeout_in_ms=int(1000 * rendezvous_timeout_seconds),
        heartbeat_timeout_in_ms=int(1000 * max(_SERVICE_PATIENCE * peer_timeout_seconds, _LEAST_PATIENCE_SECONDS)),
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name=name, num_tasks=number) for name, number in jobs.items()],
    )


@contextlib.contextmanager
def starting_servers() -> Iterator[None]:
    """TensorFlow's servers start inside, and wait for each other. Meanwhile other threads run; afterwards signals are as before.

    Python's call would hold the interpreter's lock while it waits, see `enable_collective_ops`. And the servers would keep
    SIGTERM to themselves, as a notice of preemption that nobody asks for: `kill` would do nothing.
    """
    before = signal.getsignal(signal.SIGTERM)
    token = _starts_servers.set(True)
    try:
        yield
    finally:
        _starts_servers.reset(token)
        # Python lets only the main thread set it; None: not set by Python, and unknown to it.
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def enable_collective_ops(original: Callable[[Any, bytes], None], context_handle: Any, server: bytes) -> None:
    """`TFE_EnableCollectiveOps`, which starts this worker's server and waits for those of all workers, for `starting_servers`.

    `original` holds the interpreter's lock while it waits: no other thread could say that a worker has died meanwhile, or end
    this one. `ctypes` lets go of it.
    """
    if not _starts_servers.get():
        original(context_handle, server)
        return
    library = ctypes.CDLL(_LIBRARY)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    library.TF_NewStatus.restype = ctypes.c_void_p
    library.TF_Message.restype = ctypes.c_char_p
    status = ctypes.c_void_p(library.TF_NewStatus())
    try:
        handle = ctypes.c_void_p(pointer(context_handle, None))
        library.TFE_EnableCollectiveOps(handle, server, ctypes.c_size_t(len(server)), status)
        code = library.TF_GetCode(status)
        if code:
            message = library.TF_Message(status).decode("utf-8", "replace")
            raise errors_impl.exception_type_from_error_code(code)(None, None, message)
    finally:
        library.TF_DeleteStatus(status)


class NoAnswerError(TimeoutError):
    """Workers, by their indices in `missing`, have not written what this one has waited for."""

    def __init__(self, timeout_seconds: float, missing: Sequence[int], cluster: Cluster):
        names = ", ".join(str(cluster.tasks[index]) for index in missing)
        super().__init__(f"no answer within {timeout_seconds:g} s from {names}")
        self.missing = missing


class Coordination:
    """The job's key-value store, as one worker sees it.

    A key is written once; `prefix`, put before every key, keeps the strategies of a process apart.

    Args:
        watch: the process's `FailureWatch`: its `check` raises when waiting has become pointless, and its `report` is told of an
            error that ends the job, before it is raised.
    """

    def __init__(self, cluster: Cluster, prefix: str, watch: Any):
        self.cluster = cluster
        self._watch = watch
        self._prefix = f"tfdist/{prefix}"
        self._compared: collections.OrderedDict[str, Difference] = collections.OrderedDict()
        self.listen("compared", self._difference)
        self.meetings = 0  # to which this worker has come
        self.waits_at = ""  # the words for the meeting at which it waits for others, "" where it does not

    def put(self, key: str, value: str) -> None:
        """Writes `value`; changes nothing when the key has been written."""
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            context.context().set_config_key_value(f"{self._prefix}/{key}", value)

    def get(self, key: str, timeout_seconds: float, writer: int | None = None) -> str:
        """Returns the value of `key`, which worker `writer` writes, waiting for it.

        Raises:
            TimeoutError: nobody has written it within `timeout_seconds`.
        """
        end = time.monotonic() + timeout_seconds
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(tf.errors.DeadlineExceededError):
                milliseconds = max(1, int(1000 * min(left, _POLL_SECONDS)))
                return context.context().get_config_key_value(f"{self._prefix}/{key}", milliseconds)
            self._watch.check(writer)
        raise TimeoutError(f"{key!r} was not written within {timeout_seconds:g} s")

    def all_gather(self, key: str, value: Any, timeout_seconds: float, workers: Sequence[int] | None = None) -> list[Any]:
        """Gives every worker the `value` of every worker, or of `workers`, in worker order: what JSON can carry.

        Raises:
            NoAnswerError: it names the workers that have not called it with `key` within `timeout_seconds`.
        """
        self.put(f"{key}/{self.cluster.worker_index}", json.dumps(value))
        workers = range(self.cluster.num_workers) if workers is None else workers
        end = time.monotonic() + timeout_seconds
        values = {}
        for index in workers:
            with contextlib.suppress(TimeoutError):
                values[index] = self.get(f"{key}/{index}", max(end - time.monotonic(), 0.01), index)
        missing = [index for index in workers if index not in values]
        if missing:
            raise NoAnswerError(timeout_seconds, missing, self.cluster)
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
        key = f"meeting/{self.meetings}"
        self.meetings += 1
        self.waits_at = _pointed(what, value)
        try:
            answers = self.all_gather(key, [what, value], timeout_seconds, [0] if with_chief_only else None)
        except NoAnswerError as error:
            self.fail(
                f"{self.cluster.task} is at a point where all workers must meet, {_pointed(what, value)}, but there was {error}.",
                fix="Every worker must call `fit`, `evaluate`, `predict`, `save` and the steps of a custom loop alike: look for "
                "code that only one worker runs, such as `if is_chief: model.evaluate(...)`.",
                awaited=error.missing[0],
            )
        finally:
            self.waits_at = ""
        values = []
        for index, (theirs, their_value) in enumerate(answers):
            if theirs != what:
                self.fail(
                    f"Workers run different programs: {self.cluster.task} is at {_pointed(what, value)}, when "
                    f"{self.cluster.tasks[index]} is at {_pointed(theirs, their_value)}."
                )
            values.append(their_value)
        return values

    def compare(self, key: str, value: Any, difference: Difference) -> None:
        """Ends the job where `difference` has words for another worker's value of `key`; waits for nobody. For any thread."""
        self._compared[key] = difference  # first: of two workers one at least has its own when the other's comes
        if len(self._compared) > _MOST_COMPARED:
            self._compared.popitem(last=False)
        self.tell("compared", [key, value])

    def _difference(self, index: int, heard: Any) -> str:
        difference = self._compared.get(heard[0])  # in one step: another thread may forget it
        return "" if difference is None else difference(index, heard[1])

    def tell(self, listener: str, value: Any) -> None:
        """Tells the others' `listener` of that name this `value`, what JSON can carry, and waits for nobody; for any thread."""
        self._watch.tell(f"{self._prefix}/{listener}", value)

    def listen(self, listener: str, heard: Callable[[int, Any], str]) -> None:
        """Has `heard(worker, value)` called, in another thread, for what others tell; the job ends with its words, if any."""
        self._watch.listeners[f"{self._prefix}/{listener}"] = heard

    def fail(self, expected: str, *, fix: str = _SAME_PROGRAM, awaited: int | None = None) -> NoReturn:
        """Raises RuntimeError with this text, as `errors.message`, after telling the other workers: the job cannot go on.

        `awaited` is the worker whose fault it is, because it did not come; None: this one's, or nobody's alone.
        """
        message = errors.message(expected, fix=fix)
        self._watch.report(message, awaited)
        raise RuntimeError(message)


def _pointed(what: str, value: str) -> str:
    return f"{what} {value}" if 0 < len(value) < 100 else what


def abort_collectives(message: str) -> None:
    """Makes every collective of this process that runs, or will run, fail with `message`."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def is_reachable(task: Task) -> bool:
    """Whether the process of `task` answers, and is the one that this process has talked to before."""
    try:
        context.context().check_collective_ops_peer_health(task.device, _HEALTH_MILLISECONDS)
    except tf.errors.OpError:
        return False
    return True


def seed_if_unseeded() -> None:
    """Sets TensorFlow's global random seed, unless the program has set one, so that all workers draw alike.

    It is the seed that TensorFlow takes where an operation has a seed and the program has none: what was seeded stays as it was.
    """
    if context.global_seed() is None:
        tf.random.set_seed(random_seed.DEFAULT_GRAPH_SEED)
