"""One worker process: started in a process group of its own, signalled with that group, reaped last; and who is stopped alone."""

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from tfdist.runtime import leftovers
from tfdist.runtime.cluster import Task
from tfdist.tools.launch.output import Output

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 16  # what a pipe holds
LOOK_SECONDS = 1.0  # between two looks for workers that are stopped
WAKE_LOOKS = 20  # in a row: a launcher that was stopped itself, with its workers, does not count the time


class Worker:
    """A running task.

    While it is entered the process may run or have ended, but it is not reaped: so its id, which is also its group's, cannot
    become another process's, and a signal reaches only what this worker started. On leaving, whatever is left of the
    group is killed.
    """

    def __init__(self, task: Task, command: Sequence[str], environment: Mapping[str, str], output: Output):
        self.task = task
        self.output = output
        self.exit_code: int | None = None  # None while it runs; negative for a signal, as in `subprocess`
        self.leftovers: list[str] = []  # the files that it has left for a restart, once it has been left itself
        self._told_pipe, told_through = os.pipe()
        for end in (self._told_pipe, told_through):  # who says too much must not wait: it is read when the worker has ended
            os.set_blocking(end, False)
        self._process = subprocess.Popen(
            command,
            env={**environment, **leftovers.environment_of(told_through)},
            pass_fds=(told_through,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=death_with_parent(),
        )
        os.close(told_through)
        self.pid = self._process.pid
        self.pipes = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        for pipe in self.pipes.values():
            os.set_blocking(pipe.fileno(), False)
        self.pidfd = os.pidfd_open(self.pid)  # readable once it has ended

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process (SIGSTOP, SIGTSTP): it does nothing until SIGCONT."""
        # "pid (name) state ...", where the name may hold anything.
        return pathlib.Path(f"/proc/{self.pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] == "T"

    def read(self, source: str) -> bytes | None:
        """Passes on what lies in the pipe "stdout" or "stderr"; returns it: b"" at the end, None if nothing is there yet."""
        data = self.pipes[source].read(_READ_BYTES)
        if data:
            self.output.feed(source, data)
        elif data == b"":
            self.output.end(source)
        return data

    def note_end(self) -> None:
        """Sets `exit_code`; the process has ended."""
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.exit_code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def signal(self, number: int) -> None:
        """Sends a signal to the process and everything in its group; harmless when all have ended."""
        os.killpg(self.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        try:
            for source, pipe in self.pipes.items():
                while self.read(source):
                    pass
                self.output.end(source)  # a process that left the group may still hold the pipe
                pipe.close()
            told = b""
            with contextlib.suppress(BlockingIOError):
                while data := os.read(self._told_pipe, _READ_BYTES):
                    told += data
            self.leftovers = leftovers.parse_leftovers(told)
            os.close(self._told_pipe)
        finally:
            self._process.wait()
            os.close(self.pidfd)


def death_with_parent() -> Callable[[], None]:
    """Returns what runs in a new process before anything else: the kernel kills it when this process's main thread ends.

    It does no more than two system calls: between fork and exec another thread's locks may be held for ever.
    """
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)

    return prepare


class Stops:
    """How often in a row each worker was seen stopped: by SIGSTOP, which it cannot see, so that the launcher wakes it.

    Else the others end, waiting, and the job stays. Where all that are left are stopped and none has ended, it is paused.
    """

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
