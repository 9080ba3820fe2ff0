"""Failures that speak: when a worker dies, raises or waits in vain, every other worker ends, with one message that names it.

A thread of every worker waits for the first word of a failure in the coordination service's store. Who learns of one writes it
there, so that all workers tell the same story:

    a worker raises                its `sys.excepthook` writes what it raised
    a worker's process is gone     its peers' collectives fail; they look who does not answer any more
    a worker's program has ended   its peers notice that they wait in a collective for somebody who is done
    nobody makes progress          a collective has been running for longer than the step timeout

Then collectives are aborted, so that the training loop raises, and a process that has not ended some seconds later is ended.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.runtime import coordination
from tfdist.runtime.cluster import Cluster
from tfdist.runtime.coordination import Coordination

_POLL_SECONDS = 1.0
# After its collectives were aborted, a worker has this long to end by itself.
_GRACE_SECONDS = 12.0
# So long a failed job's chief goes on answering for the others, who read from its store what has happened.
_LINGER_SECONDS = 6.0
# So long it waits at the end of its program for workers that have something left to do on their own.
_LAST_SECONDS = 3600.0
# A program that waits for a worker whose own program has ended is given this long: the end may have come just after it, and a
# busy machine can take seconds for the rest.
_ENDED_SECONDS = 10.0
# A key that was written before now is read within this long, on a busy machine too.
_READ_SECONDS = 1.0

_COLLECTIVE_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """What ended the job: the worker it started on, and a clause that says what happened ("raised ValueError: ...")."""

    worker_index: int
    what: str

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure:
        return cls(**json.loads(text))


# Per rank of this process that runs a program of collectives at this moment: a count that is another for its next program, and
# the program, whose `str` describes it.
Running = Callable[[], Mapping[int, tuple[int, Any]]]


class FailureWatch:
    """Watches the other workers of `cluster`, and tells them of this one. One per process.

    Beside `coordination.abort_collectives`, `abort` makes what waits for another worker in this process fail with a message.
    """

    def __init__(self, cluster: Cluster, abort: Callable[[str], None]):
        self._cluster = cluster
        self._abort = abort
        self._store = Coordination(cluster, "job")
        self._watched: list[tuple[Running, float]] = []
        self._since: dict[tuple[int, int], tuple[int, float]] = {}
        self._failure: Failure | None = None
        self._known = threading.Event()
        self._raised = False
        self._is_ending = False
        self._thread = threading.Thread(target=self._watch, name="tfdist failure watch", daemon=True)

    def start(self) -> None:
        """Starts the thread, and takes part in the end of the process."""
        previous = sys.excepthook
        sys.excepthook = lambda *error: self._on_exception(previous, *error)
        atexit.register(self._at_exit)
        self._thread.start()

    def add(self, running: Running, step_timeout_seconds: float) -> None:
        """Watches the progress of what is `running`, whose collectives may wait for others so long."""
        self._watched.append((running, step_timeout_seconds))

    def check(self) -> None:
        """Raises RuntimeError when the job has failed: for code that waits for another worker."""
        if self._failure is not None:
            raise RuntimeError(self._message(self._failure))

    def report(self, message: str) -> None:
        """Tells the other workers of an error that this worker is about to raise, and that ends the job."""
        self._raised = True
        self._learn(self._agree(Failure(self._cluster.worker_index, f"raised RuntimeError: {message}")))

    # The thread

    def _watch(self) -> None:
        while not self._known.is_set() and not self._is_ending:
            try:
                text = self._store.poll("failure", _POLL_SECONDS)
                failure = Failure.from_json(text) if text else self._stuck()
            except tf.errors.OpError:  # the chief does not answer
                failure = self._unreachable()
                time.sleep(0 if failure else _POLL_SECONDS)
            if failure is not None and not self._raised:
                self._end(self._agree(failure))
                return

    def _end(self, failure: Failure) -> None:
        self._learn(failure)
        if self._is_ending:
            return
        self._abort(self._message(failure))
        coordination.abort_collectives(self._message(failure))
        time.sleep(_GRACE_SECONDS)
        if not self._is_ending:
            self._say(failure)
            _flush()
            os._exit(errors.PEER_FAILED_EXIT_CODE)

    def _learn(self, failure: Failure) -> None:
        self._failure = failure
        self._known.set()

    def _agree(self, failure: Failure) -> Failure:
        """Writes `failure`, and returns the one that was written first."""
        try:
            if not self._store.put("failure", failure.to_json()):
                return Failure.from_json(self._store.poll("failure", 2.0) or failure.to_json())
        except tf.errors.OpError:
            pass  # the chief is gone, and its store with it
        return failure

    def _stuck(self) -> Failure | None:
        """Returns a failure when a rank of this worker waits in a collective for too long."""
        here = self._cluster.worker_index
        for seconds, limit, program in self._waiting():
            if seconds > _ENDED_SECONDS:
                ended = self._store.poll("ended", 0.001)
                if ended is not None and int(ended) != here:
                    return Failure(int(ended), f"ended its program while {self._cluster.task} was waiting for it in {program}")
            if seconds > limit:
                what = f"has waited for the other workers for {seconds:.0f} s (`step_timeout_seconds`) in {program}"
                return Failure(here, what)
        return None

    def _waiting(self) -> list[tuple[float, float, Any]]:
        """Returns, per local rank in a program: for how many seconds it has been in it, how many it may be, and the program."""
        now, found = time.monotonic(), {}
        for number, (running, limit) in enumerate(self._watched):
            for rank, (count, program) in running().items():
                before, since = self._since.get((number, rank), (None, now))
                found[number, rank] = (count, since if before == count else now, limit, program)
        self._since = {key: (count, since) for key, (count, since, _, _) in found.items()}
        return [(now - since, limit, program) for _, since, limit, program in found.values()]

    def _unreachable(self) -> Failure | None:
        """Returns a failure of the first worker that does not answer, None when all do."""
        for index, task in self._cluster.others():
            if not coordination.is_reachable(task):
                return Failure(index, self._how_it_left(index))
        return None

    def _how_it_left(self, index: int) -> str:
        with contextlib.suppress(tf.errors.OpError):
            if self._store.poll(f"ended/{index}", _READ_SECONDS) is not None:
                return f"ended its program while {self._cluster.task} was waiting for it in a collective"
        return "died, or cannot be reached any more"

    # The main thread

    def _on_exception(self, previous: Any, kind: type, value: BaseException, traceback: Any) -> None:
        """`sys.excepthook`: an exception is about to end this process."""
        failure = self._cause() if isinstance(value, _COLLECTIVE_ERRORS) else self._failure
        if failure is None:
            self._raised = True
            failure = self._agree(Failure(self._cluster.worker_index, f"raised {_headline(kind, value)}"))
            self._learn(failure)
        if failure.worker_index == self._cluster.worker_index:
            self._raised = True
            previous(kind, value, traceback)
        else:
            self._say(failure)

    def _cause(self) -> Failure | None:
        """Returns why a collective has failed: what another worker has written, or who does not answer."""
        end = time.monotonic() + coordination.HEARTBEAT_TIMEOUT_SECONDS + 5
        while time.monotonic() < end:
            if self._known.wait(0.7):
                return self._failure
            failure = self._unreachable()
            if failure is not None:
                failure = self._agree(failure)
                self._learn(failure)
                return failure
        return None

    def _at_exit(self) -> None:
        """The chief hosts the store: it leaves last, or the others would take its end for a failure."""
        self._is_ending = True
        failed = self._failure is not None
        here = self._cluster.worker_index
        try:
            if not failed:
                self._store.put("ended", str(here))
                self._store.put(f"ended/{here}", "")
            self._store.put(f"left/{here}", "")
            if self._cluster.is_chief:
                self._wait_for_others(_LINGER_SECONDS if failed else _LAST_SECONDS)
        except tf.errors.OpError:
            pass  # the chief is gone already
        if failed and not self._raised:
            _flush()
            os._exit(errors.PEER_FAILED_EXIT_CODE)

    def _wait_for_others(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for index, task in self._cluster.others():
            while time.monotonic() < end and self._store.poll(f"left/{index}", 0.5) is None:
                if not coordination.is_reachable(task):
                    break

    # Words

    def _message(self, failure: Failure) -> str:
        here, task = self._cluster.task, self._cluster.tasks[failure.worker_index]
        which = "This worker" if failure.worker_index == self._cluster.worker_index else f"Worker {failure.worker_index}"
        return (
            f"tfdist: {which}, {task}, {failure.what}. {here} ends too: no worker can train without the others. Start the job "
            "again; with `keras.callbacks.BackupAndRestore` it continues from its last backup."
        )

    def _say(self, failure: Failure) -> None:
        _flush()
        print(self._message(failure), file=sys.stderr, flush=True)


def _headline(kind: type, value: BaseException) -> str:
    """Returns the line of an exception that says most; the first of a graph's error is a title."""
    lines = [line.strip() for line in str(value).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("Graph execution error", "Detected at node", "File "))] or lines
    return f"{kind.__name__}: {lines[0]}"[:500] if lines else kind.__name__


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
