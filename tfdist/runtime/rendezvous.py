"""The workers of a job find each other, and connect, before TensorFlow's servers start.

TensorFlow would wait for missing workers itself, but for ever, deaf to signals and without a word. So each worker first listens
at the address that its server takes over afterwards, and connects to every other, for the whole job (see `peers`):

    worker 2   "tfdist 2"  ──▶  all others      tries each address until it is answered
               ◀──  "tfdist 0", ...             to those before it the connection stays; to those after it was a trial
    each       "ready"     ──▶  all             when it has reached all, and all have reached it; all go on when all are ready
               "missing: worker 3 (...)"        when the time is over
    launcher   "tfdist failed ..."  ──▶  each   when a worker has ended, which may not have been connected
"""

import json
import select
import socket
import threading
import time

from tfdist import errors
from tfdist.runtime.cluster import Cluster, Task
from tfdist.runtime.failure import Failure
from tfdist.runtime.peers import Peers

_POLL_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
# Who connects says at once who it is.
_GREETING_SECONDS = 2.0
_LONGEST_LINE = 4096
# So much longer the others wait than the chief, who knows best who is missing.
_CHIEF_FIRST_SECONDS = 2.0


class WorkerFailedError(Exception):
    """A worker has ended while the others were connecting; `failure` says which one, and how."""

    def __init__(self, failure: Failure):
        super().__init__(failure.what)
        self.failure = failure


def wait_for_workers(cluster: Cluster, timeout_seconds: float) -> Peers:
    """Returns the connections to all other workers of `cluster` when all have been started, and are connected to all.

    Raises:
        RuntimeError: this machine already uses the port at which this worker is to be reached.
        TimeoutError: workers are missing after `timeout_seconds`; it names them.
        WorkerFailedError: a worker has ended meanwhile.
    """
    with _held_port(cluster.task) as listener:
        rendezvous = _Rendezvous(cluster, listener, time.monotonic() + timeout_seconds)
        try:
            return rendezvous.run()
        except BaseException as error:
            if isinstance(error, WorkerFailedError):
                rendezvous.peers.tell(error.failure.to_word())
            rendezvous.peers.close()
            raise
        finally:
            rendezvous.is_over.set()


def tell_of_failure(task: Task, failure: Failure) -> bool:
    """Tells the worker `task` on this machine, if it is connecting, of a failure; returns whether somebody listens there."""
    try:
        with socket.create_connection((_host(task), task.port), 1.0) as connection:
            connection.sendall(f"tfdist failed {json.dumps(failure.to_word())}\n".encode())
    except OSError:
        return False
    return True


class _Rendezvous:
    def __init__(self, cluster: Cluster, listener: socket.socket, end: float):
        self.peers = Peers()
        self.is_over = threading.Event()
        self._cluster = cluster
        self._listener = listener
        self._end = end
        self._ready: set[int] = set()
        self._others = {index for index, _ in cluster.others()}
        self._unreached = dict.fromkeys(self._others, "it has not answered")  # and why not

    def run(self) -> Peers:
        for index in self._others:
            threading.Thread(target=self._reach, args=(index,), name="tfdist rendezvous", daemon=True).start()
        is_ready = False
        while not (is_ready and self._others <= self._ready):
            for index, word in self.peers.listen(_POLL_SECONDS):
                if word is None:
                    raise WorkerFailedError(Failure(index, "ended while the workers of the job were connecting"))
                if "missing" in word:
                    raise TimeoutError(word["missing"])
                if "failed" in word:
                    raise WorkerFailedError(Failure.from_word(word))
                if "ready" in word:
                    self._ready.add(index)
            self._accept()
            if not is_ready and not self._unreached and self._others <= self.peers.indices():
                is_ready = True
                self.peers.tell({"ready": True})
            if time.monotonic() > self._end + (0 if self._cluster.is_chief else _CHIEF_FIRST_SECONDS):
                missing = self._missing()
                self.peers.tell({"missing": missing})
                raise TimeoutError(missing)
        return self.peers

    def _accept(self) -> None:
        """Answers those that have connected to this worker, and keeps the connections of workers after it."""
        while select.select([self._listener], [], [], 0)[0]:
            connection = self._listener.accept()[0]
            name, _, rest = _line(connection, _GREETING_SECONDS).partition(" ")
            if name == "tfdist" and rest.startswith("failed "):  # the launcher
                raise WorkerFailedError(Failure.from_word(json.loads(rest.removeprefix("failed "))))
            index = int(rest) if name == "tfdist" and rest.isdecimal() else self._cluster.num_workers  # not one of us
            answered = index < self._cluster.num_workers and self._greet(connection)
            if not (answered and index > self._cluster.worker_index and self.peers.add(index, connection)):
                connection.close()

    def _greet(self, connection: socket.socket) -> bool:
        try:
            connection.sendall(f"tfdist {self._cluster.worker_index}\n".encode())
        except OSError:
            return False
        return True

    def _reach(self, index: int) -> None:
        """A thread: reaches worker `index` at its address as soon as it is there."""
        task = self._cluster.tasks[index]
        while not self.is_over.is_set():
            try:
                connection = socket.create_connection((_host(task), task.port), _CONNECT_SECONDS)
            except TimeoutError:
                self._unreached[index] = "it has not answered"
            except OSError as error:  # not started yet, or its name is not known yet
                self._unreached[index] = error.strerror or str(error)
            else:
                # It answers when it looks, which may be after this worker's time.
                answer = _line(connection, max(self._end - time.monotonic(), 1.0)) if self._greet(connection) else ""
                is_there = answer == f"tfdist {index}"
                if not is_there or index > self._cluster.worker_index or not self.peers.add(index, connection):
                    connection.close()
                if is_there:
                    del self._unreached[index]
                    return
                self._unreached[index] = (
                    "what listens there is not that worker of this job" if answer else "it has closed the connection"
                )
            time.sleep(_POLL_SECONDS)

    def _missing(self) -> str:
        here, tasks, connected = self._cluster.task, self._cluster.tasks, self.peers.indices()
        never = [index for index in sorted(self._others - connected) if index > self._cluster.worker_index]
        found = [f"{', '.join(str(tasks[index]) for index in never)} did not come"] if never else []
        unreached = [index for index in sorted(self._unreached) if index not in never]
        found += [f"{tasks[index]} cannot be reached from {here}: {self._unreached[index]}" for index in unreached]
        late = ", ".join(str(tasks[index]) for index in sorted(self._others - self._ready))
        return "; ".join(found) or f"{late} could not reach all others"


def _held_port(task: Task) -> socket.socket:
    try:
        return socket.create_server(("", task.port), backlog=1024)
    except OSError as error:
        raise errors.runtime_error(
            f"{task} cannot start: port {task.port}, which TF_CONFIG gives it, cannot be used ({error.strerror}).",
            fix="End what uses it (a worker of an earlier run?), or choose another port for this task, on every worker.",
        ) from error


def _host(task: Task) -> str:
    return task.host.strip("[]")


def _line(connection: socket.socket, seconds: float) -> str:
    """Returns the next line that `connection` sends, "" when none comes; what follows it is left there."""
    end, received = time.monotonic() + seconds, b""
    try:
        while not received.endswith(b"\n") and len(received) < _LONGEST_LINE and (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            byte = connection.recv(1)
            if not byte:
                break
            received += byte
    except OSError:
        return ""
    return received.decode("utf-8", "replace").strip()
