"""A job and its attempts: each starts the workers, watches them, and ends the others when one fails.

Note: the order of ends.
Which worker failed first decides what is reported. All events come from the epoll of one event loop, which returns descriptors
in the order in which they became ready; so two workers that end between two looks are still seen in their order.

Note: peers of a failed worker.
A worker that ends only because another failed exits with `PEER_FAILED_EXIT_CODE`. It may end before the one that it blames,
whose process still dumps or unwinds. So it is the cause only if nobody fails otherwise in the time that all are given.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import pathlib
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from tfdist.errors import PEER_FAILED_EXIT_CODE
from tfdist.runtime.cluster import Cluster, Task
from tfdist.runtime.failure import Failure
from tfdist.runtime.rendezvous import tell_of_failure
from tfdist.tools.launch.output import Output, say
from tfdist.tools.launch.worker import LOOK_SECONDS, WAKE_LOOKS, Stops, Worker

KILL_SECONDS = 5.0  # from SIGTERM to SIGKILL
DELAY_SECONDS = 1.0  # from the end of an attempt to the next
USAGE_EXIT_CODE = 2


@dataclasses.dataclass(frozen=True)
class Job:
    """The command, the same in every attempt."""

    command: tuple[str, ...]  # what follows `python -u`: the script, or "-m" and the module, and its arguments
    device_environments: tuple[dict[str, str], ...]  # variables of each worker, in order of rank
    chief: bool = False  # whether the first worker is the chief
    max_restarts: int = 0  # attempts after the first
    grace_seconds: float = 20.0  # what workers get to end by themselves after a failure or a signal
    name: str = ""  # TFDIST_JOB, by which a restart is known from a new job; "" where there are no restarts
    log_dir: pathlib.Path | None = None  # gets a file per attempt and worker; None: none, and the console shows every worker

    @property
    def workers(self) -> int:
        return len(self.device_environments)

    @property
    def attempts(self) -> int:
        return 1 + self.max_restarts


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    exit_code: int  # the launcher's: 0, that of the failed worker, or 128 + the signal, as shells do
    summary: str  # the same in words, for example "worker 2 failed with exit code 1"
    failure: str = ""  # what the failed worker printed at last, under a headline; empty if none failed
    stopped: bool = False  # whether the launcher was told to stop
    leftovers: tuple[str, ...] = ()  # after a success: files that only a restart would use


class Attempt:
    """One attempt of `job`, the first of number 0. `run` returns when no process of it is left."""

    def __init__(self, job: Job, number: int):
        self._job = job
        self._number = number
        self._workers: list[Worker] = []
        self._received: signal.Signals | None = None  # the first one
        self._failures: list[Worker] = []  # in the order of their ends, until the launcher sends a signal itself
        self._has_sent = False
        self._untold: list[Worker] = []  # who may not know yet that a worker has failed
        self._loop = asyncio.get_running_loop()
        self._all_ended = asyncio.Event()
        self._plan: list[asyncio.TimerHandle] = []  # what is to be sent

    async def run(self) -> Outcome:
        _on_signals(self._on_signal)
        tasks = tasks_on_free_ports(self._job.workers, chief=self._job.chief)
        say(
            f"{_count(self._job.workers)} on localhost, "
            f"ports {', '.join(str(task.port) for task in tasks)}, python {shlex.join(self._job.command)}"
        )
        if self._log_dir:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            say(f"output in {self._log_dir}, a file per worker; the console shows {tasks[0].name} only")
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            for rank in range(self._job.workers):
                self._workers.append(self._start(Cluster(tasks, rank), stack))
            await self._watch()
        outcome = self._outcome()
        say(f"{self._label} ended after {time.monotonic() - start:.1f} s: {outcome.summary}")
        return outcome

    @property
    def _label(self) -> str:
        return f"attempt {self._number + 1} of {self._job.attempts}"

    @property
    def _log_dir(self) -> pathlib.Path | None:
        return self._job.log_dir and self._job.log_dir / f"attempt_{self._number}"

    def _log_file(self, task: Task) -> pathlib.Path | None:
        return self._log_dir and self._log_dir / f"{task.type}_{task.index}.log"

    def _start(self, cluster: Cluster, stack: contextlib.ExitStack) -> Worker:
        task, rank = cluster.task, cluster.worker_index
        environment = {
            **os.environ,
            **self._job.device_environments[rank],
            "TF_CONFIG": cluster.tf_config(),
            "TFDIST_LAUNCHER": "1",
            "TFDIST_ATTEMPT": str(self._number),
            **({"TFDIST_JOB": self._job.name} if self._job.name else {}),
        }
        path = self._log_file(task)
        # Unbuffered, to be read while it grows; appended, so that no earlier run's output is lost.
        file = stack.enter_context(path.open("ab", buffering=0)) if path else None
        output = Output(task.name, shown=rank == 0 or not path, file=file)
        return stack.enter_context(Worker(task, [sys.executable, "-u", *self._job.command], environment, output))

    async def _watch(self) -> None:
        errors: list[Exception] = []

        def on_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            errors.append(context["exception"])
            self._all_ended.set()

        self._loop.set_exception_handler(on_error)
        for worker in self._workers:
            self._loop.add_reader(worker.pidfd, self._on_end, worker)  # Note: the order of ends
            for source, pipe in worker.pipes.items():
                self._loop.add_reader(pipe, self._on_output, worker, source)
        stops = Stops()
        while not self._all_ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), LOOK_SECONDS)
            if self._untold:
                self._tell()
            for worker in stops.overdue(self._workers):
                say(f"{worker.task.name} was stopped alone for {WAKE_LOOKS * LOOK_SECONDS:.0f} s: it is woken, by SIGCONT")
                worker.signal(signal.SIGCONT)
        self._cancel_plan()
        for pipe in (pipe for worker in self._workers for pipe in worker.pipes.values()):
            self._loop.remove_reader(pipe)  # a process that left the group may still hold it
        if errors:
            raise errors[0]  # such as BrokenPipeError, when nobody reads the output

    def _on_output(self, worker: Worker, source: str) -> None:
        if worker.read(source) == b"":
            self._loop.remove_reader(worker.pipes[source])

    def _on_end(self, worker: Worker) -> None:
        self._loop.remove_reader(worker.pidfd)
        worker.note_end()
        running = [other for other in self._workers if other.exit_code is None]
        if worker.exit_code and not self._has_sent:
            self._failures.append(worker)
            if len(self._failures) == 1 and running:
                self._untold = running
                grace = f"the others have {self._job.grace_seconds:g} s to end by themselves"
                say(f"{worker.task.name} {_how(worker.exit_code)}; {grace}")
                self._plan_ends()
                for other in running:
                    other.signal(signal.SIGCONT)  # who has been stopped cannot end by itself
                self._tell()
        if not running:
            self._all_ended.set()

    def _tell(self) -> None:
        """Tells workers of the first failure that still wait for each other to start: they cannot know. See `rendezvous`."""
        failed = self._failures[0]
        failure = Failure(self._workers.index(failed), _how(failed.exit_code))
        self._untold = [
            worker for worker in self._untold if worker.exit_code is None and not tell_of_failure(worker.task, failure)
        ]

    def _on_signal(self, received: signal.Signals) -> None:
        if self._received is None:
            self._received = received
            self._plan_ends()
            self._send(received)
        else:  # somebody is in a hurry
            self._cancel_plan()
            self._send(signal.SIGKILL)

    def _plan_ends(self) -> None:
        """From now on the workers have the grace time to end by themselves."""
        self._cancel_plan()
        ends = ((0.0, signal.SIGTERM), (KILL_SECONDS, signal.SIGKILL))
        self._plan = [self._loop.call_later(self._job.grace_seconds + after, self._send, number) for after, number in ends]

    def _cancel_plan(self) -> None:
        for handle in self._plan:
            handle.cancel()

    def _send(self, number: signal.Signals) -> None:
        self._has_sent = True
        for worker in self._workers:
            worker.signal(number)

    def _outcome(self) -> Outcome:
        """The meaning of the workers' ends together. Call it when their output is complete."""
        failed = min(self._failures, key=lambda worker: worker.exit_code == PEER_FAILED_EXIT_CODE, default=None)
        failure = self._describe(failed) if failed else ""
        if self._received:
            return Outcome(128 + self._received, f"stopped by {self._received.name}", failure, stopped=True)
        if failed:
            exit_code = failed.exit_code if failed.exit_code > 0 else 128 - failed.exit_code
            return Outcome(exit_code, f"{failed.task.name} {_how(failed.exit_code)}", failure)
        stopped = next((worker.output.stopped_by_nan for worker in self._workers if worker.output.stopped_by_nan), "")
        nan = f", but training was stopped at a loss of NaN or infinity: {stopped!r}" if stopped else ""
        leftovers = tuple(path for worker in self._workers for path in worker.leftovers)
        return Outcome(0, f"{_count(self._job.workers)} succeeded{nan}", leftovers=leftovers)

    def _describe(self, failed: Worker) -> str:
        path = self._log_file(failed.task)
        where = f" (all of it in {path})" if path else ""
        lines = failed.output.last_words()
        end = f"its last output{where}:" if lines else "it printed nothing"
        headline = f"tfdist: {failed.task.name} (pid {failed.pid}, {self._label}) {_how(failed.exit_code)}; {end}"
        return "\n".join([headline, *lines])


async def run_job(job: Job) -> int:
    """Runs `job` to its end and returns the exit code for the launcher. Call it in the main thread.

    After a failure all workers are started again on new ports; the script itself goes on from its last backup. A job is not
    restarted after a signal to the launcher, nor after exit code 2, which says that the script's arguments are wrong.
    """
    for number in itertools.count():
        outcome = await Attempt(job, number).run()
        is_last = outcome.exit_code == 0 or outcome.stopped or number + 1 == job.attempts
        if outcome.exit_code == USAGE_EXIT_CODE and not is_last:
            is_last = True
            say("not restarting: exit code 2 says that the script's arguments are wrong")
        if outcome.failure:
            sys.stderr.write(outcome.failure + "\n")
        if is_last:
            _remove(outcome.leftovers)
            return outcome.exit_code
        received: asyncio.Queue[signal.Signals] = asyncio.Queue()
        _on_signals(received.put_nowait)
        say(f"restarting, attempt {number + 2} of {job.attempts}, from the last backup the script made")
        with contextlib.suppress(TimeoutError):
            first = await asyncio.wait_for(received.get(), DELAY_SECONDS)
            say(f"stopped by {first.name}")
            return 128 + first
    raise AssertionError("unreachable: attempts are counted without an end")


def _on_signals(callback: Callable[[signal.Signals], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, callback, number)


def _remove(files: Iterable[str]) -> None:
    """Removes files, and the directories that are empty then."""
    for file in dict.fromkeys(files):
        with contextlib.suppress(OSError):
            os.remove(file)
            os.rmdir(os.path.dirname(file))


def _count(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}"


def _how(exit_code: int) -> str:
    if exit_code > 0:
        return f"failed with exit code {exit_code}"
    if exit_code == -signal.SIGKILL:
        return "was ended by SIGKILL (out of memory?)"
    names = {member.value: member.name for member in signal.Signals}  # without the real-time ones
    return f"was ended by {names.get(-exit_code, f'signal {-exit_code}')}"


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
