"""A job: the processes that run one case together. Imports no TensorFlow.

Every case runs in processes of its own: a fresh TensorFlow, whose environment is set before it is imported. Parent and
processes talk in JSON lines: the parent sends the case, every process answers when it is ready, and then once per request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, Self

from benchmarks.cases import Case

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_STDERR_TAIL = 2000  # characters of a failed process's stderr to show
_END_SECONDS = 10.0  # to end by themselves, for all processes together
_FIXED = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}
SHARERS = "TFDIST_WORKERS_PER_GPU"  # of how many processes, or jobs, a GPU's memory is
# They would make a worker of any process, or other devices.
_NOT_INHERITED = ("TF_CONFIG", "TFDIST_DEVICES_PER_WORKER", "TFDIST_LOGICAL_GPUS", SHARERS)


class JobError(RuntimeError):
    """A process of a job died, hung or reported an error; the job has been ended.

    Args:
        reason: one line.
        stderr: the end of what the process wrote there.
    """

    def __init__(self, reason: str, stderr: str = ""):
        super().__init__(f"{reason}\n{stderr}".strip())
        self.reason = reason


class Hosts(Protocol):
    """Machines, real or not, on which processes of a job run.

    Attributes:
        addresses: the IP address of each.
    """

    addresses: Sequence[str]

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Returns `command` as it is to be called to run on `host`, in the same process."""


class Job:
    """The processes that run one case, each `python -m benchmarks.child MEASUREMENT`.

    A multi-worker case has one per worker, which find each other by TF_CONFIG; a case of PyTorch has one per rank; every other
    case has one.

        with Job("memory", case, environment={}, timeout_seconds=600) as job:
            job.ready                        # what each process said when it was ready
            job.ask({"steps": 5})            # one answer per process and request

    All processes get a request at once. The first to die, to report an error or not to answer in time ends the job: the others
    could only wait for it. Every process is ended by its own process id.

    Args:
        measurement: what is measured, see `benchmarks.child`.
        case: what it is measured on.
        environment: variables set in the processes beside those that every one gets.
        timeout_seconds: longest wait for the answers to one request.
        program: what each process runs, before the measurement.
        hosts: where they run, as many on each, in order; None: on this machine.

    Raises:
        JobError: on entering or asking, when a process dies, hangs or reports an error.
    """

    def __init__(
        self,
        measurement: str,
        case: Case,
        *,
        environment: dict[str, str],
        timeout_seconds: float,
        program: Sequence[str] = (sys.executable, "-m", "benchmarks.child"),
        hosts: Hosts | None = None,
    ):
        self._case = case
        self._timeout_seconds = timeout_seconds
        self._lines: queue.Queue[tuple[int, str | None]] = queue.Queue()  # (process, line), None after the last
        self._processes: list[_Process] = []
        try:
            sharers = int(environment.get(SHARERS, 1))
            number = case.num_processes
            places = [None if hosts is None else index * len(hosts.addresses) // number for index in range(number)]
            names = ["localhost" if hosts is None or host is None else hosts.addresses[host] for host in places]
            ranks = _torch_ranks(case, names[0]) if case.is_torch else _tf_configs(case, sharers, names)
            for index, (own, host) in enumerate(zip(ranks, places, strict=True)):
                command = [*program, measurement]
                command = command if hosts is None or host is None else hosts.command(host, command)
                variables = {**(_NO_GPU if not case.logical_gpus else {}), **environment, **own}
                self._processes.append(_Process(command, index, variables, self._lines))
            self.ready = self.ask(dataclasses.asdict(case))
        except BaseException:
            self._kill()
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Sends `request` to every process and returns their answers, in worker order."""
        for process in self._processes:
            process.send(request)
        answers: list[dict[str, Any] | None] = [None] * len(self._processes)
        end = time.monotonic() + self._timeout_seconds
        while None in answers:
            try:
                index, line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                self._fail(answers.index(None), f"no answer in {self._timeout_seconds:g} s, killed")
            if line is None:
                self._fail(index, f"ended with exit code {self._processes[index].end(_END_SECONDS)}")
            answers[index] = json.loads(line)
            if "error" in answers[index]:
                self._fail(index, answers[index]["error"])
        return answers

    def _fail(self, index: int, what: str) -> NoReturn:
        """Ends the job, of which process `index` is the first to fail."""
        self._kill()
        name = f"{self._case.label}, worker {index}" if len(self._processes) > 1 else self._case.label
        raise JobError(f"{name}: {what}", self._processes[index].stderr_tail())

    def close(self) -> None:
        """Ends the processes: by the end of their input, all at once, or by a kill when that does not help."""
        for process in self._processes:
            process.end_input()
        end = time.monotonic() + _END_SECONDS
        for process in self._processes:
            process.close(end - time.monotonic())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None:  # in the middle of a step, where no process would see the end of its input
            self._kill()
        self.close()

    def _kill(self) -> None:
        for process in self._processes:
            process.end(0)


class _Process:
    """One process of a job; puts (index, line) in `lines` for every line that it writes, and (index, None) at its end."""

    def __init__(self, command: list[str], index: int, environment: dict[str, str], lines: queue.Queue[tuple[int, str | None]]):
        self._index = index
        self._lines = lines
        self._stderr = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 (closed by `close`)
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**inherited, **_FIXED, "PYTHONPATH": os.pathsep.join(paths), **environment},
        )
        threading.Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        for line in self._process.stdout:
            self._lines.put((self._index, line))
        self._lines.put((self._index, None))

    def send(self, request: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the end of its output tells
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def end_input(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self, seconds: float) -> int:
        """Waits `seconds` for the process's end, kills it otherwise, and returns its exit code."""
        try:
            return self._process.wait(timeout=max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self, seconds: float) -> None:
        self.end(seconds)
        self._stderr.close()

    def stderr_tail(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-_STDERR_TAIL:]


def _tf_configs(case: Case, sharers: int, names: Sequence[str]) -> list[dict[str, str]]:
    """Returns the variables that tell each process of `case` its place in the job, and its part of the GPU.

    `names` has the host of each.
    """
    if not case.multi_worker or case.num_processes == 1:
        return [{}]
    addresses = [f"{name}:{port}" for name, port in zip(names, _free_ports(case.num_processes), strict=True)]
    parts = {"TFDIST_LOGICAL_GPUS": "1", SHARERS: str(sharers * case.logical_gpus)} if case.logical_gpus else {}
    return [
        {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}), **parts}
        for index in range(case.num_processes)
    ]


def _torch_ranks(case: Case, master: str) -> list[dict[str, str]]:
    """Returns the variables that tell each process of `case` its rank, as `torchrun` sets them."""
    (port,) = _free_ports(1)
    shared = {"MASTER_ADDR": master, "MASTER_PORT": str(port), "WORLD_SIZE": str(case.num_processes)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(case.num_processes)]


# As `tfdist.tools.launch` has them, but importing tfdist would import TensorFlow here.
def _free_ports(number: int) -> list[int]:
    """Returns ports that nobody uses now. They are not reserved: a job that finds one taken fails to start."""
    with contextlib.ExitStack() as stack:
        # All are held until the last is found: the system would give a closed one out again.
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for held in sockets:
            held.bind(("", 0))
        return [held.getsockname()[1] for held in sockets]
