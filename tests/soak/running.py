"""Runs a job, commits its faults from outside at their moments, and looks at what remains."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import psutil

from tests import forks, workers
from tests.soak import hosts, marks, outside, program
from tests.soak.jobs import Job
from tfdist.errors import PEER_FAILED_EXIT_CODE

POLL_SECONDS = 0.02
LIMIT_SECONDS = 240.0  # of an attempt
PATIENCE_SECONDS = 100.0  # from a fault that ends the job to the end of the attempt, before the driver ends it


@dataclasses.dataclass
class Strike:
    """A fault that was committed: where its victim was, and how long the attempt's workers, but for a stopped one, went on."""

    act: str
    attempt: int
    worker: int
    at: float
    mark: str = "started"
    since: float = 0.0
    ends: bool = True  # whether no worker can go on
    is_for_ever: bool = False  # it stopped the victim, who does not end by itself
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.act} of worker {self.worker} in attempt {self.attempt} at {self.mark} + {self.since:.2f} s"


@dataclasses.dataclass
class Outcome:
    """How a run ended.

    Attributes:
        exit_code: the launcher's; without it, by the same rule, of a worker of the last attempt.
        codes: those of the workers, by attempt; None where the launcher keeps them, or where the run had to end it.
        strikes: the faults that were committed.
        left: processes, sockets and files that remained.
        outputs: what was printed, by (attempt, worker); the launcher's under (-1, -1).
        timed_out: whether the run had to be ended.
    """

    exit_code: int | None = None
    codes: list[list[int | None]] = dataclasses.field(default_factory=list)
    strikes: list[Strike] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)
    outputs: dict[tuple[int, int], str] = dataclasses.field(default_factory=dict)
    timed_out: bool = False

    @property
    def attempts(self) -> int:
        return 1 + max((attempt for attempt, _ in self.outputs), default=0)


@dataclasses.dataclass
class _Process:
    """One worker of an attempt."""

    handle: Any  # subprocess.Popen or forks.Fork; None: the launcher's child
    process: psutil.Process
    ended: float | None = None
    code: int | None = None

    def send(self, number: int) -> None:
        """Sends a signal, if it has not ended: nobody else can have its id before it has been reaped."""
        self.look()
        if self.ended is None:
            os.kill(self.process.pid, number)

    def look(self) -> None:
        """Notes whether it has ended."""
        if self.ended is not None:
            return
        if self.handle is not None:
            self.code = self.handle.poll()
            gone = self.code is not None
        else:
            try:
                gone = self.process.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                gone = True
        if gone:
            self.ended = time.time()


class Run:
    """One run of `job` in `folder`, which is made for it, with `faults`: see `faults.py`."""

    def __init__(self, job: Job, folder: pathlib.Path, faults: list[dict[str, Any]]):
        self.job = job
        self.folder = folder
        self.cable: hosts.Cable | None = None
        self.launcher: subprocess.Popen | None = None
        self.processes: dict[tuple[int, int], _Process] = {}
        self._all_faults = faults
        self._faults = [fault for fault in faults if "mark" in fault]
        self.later: list[tuple[float, Any]] = []
        self._stopped: set[int] = set()  # the workers that do not end by themselves
        self._ports: set[int] = set()
        self._taken: list[socket.socket] = []  # what holds ports that a worker was given
        self.disk = outside.Disk(folder / "disk", wanted=any("disk" in fault["act"] for fault in faults))
        (folder / "tmp").mkdir(parents=True)
        self.backup = self.disk.folder / "backup" if self.disk.wanted else folder / "backup"
        text = json.dumps({"job": job.name, "backup": str(self.backup), "faults": faults}, indent=1)
        (folder / "spec.json").write_text(text, "utf-8")
        self.outcome = Outcome()

    def run(self) -> Outcome:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.disk)
            if self.job.launch == "hosts":
                self.cable = stack.enter_context(hosts.joined())
            try:
                self._launch() if self.job.launch == "run" else self._attempts()
            finally:
                for process in self.processes.values():  # none is left, unless the run is being ended
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.process.kill()
            self._look_behind()
        self._read()
        return self.outcome

    def phases(self) -> dict[int, list[tuple[str, float]]]:
        """Returns, for each worker of the first attempt, its marks, and the seconds from each to the next or to the end."""
        found = {}
        for (attempt, worker), process in self.processes.items():
            if attempt == 0:
                all_marks = [["started", process.process.create_time()], *marks.read(self.folder, "marks", 0, worker)]
                ends = [at for _, at in all_marks[1:]] + [process.ended]
                found[worker] = [(name, max(end - at, 0.0)) for (name, at), end in zip(all_marks, ends, strict=True)]
        return found

    # Starting

    def _environment(self, **more: str) -> dict[str, str]:
        own = {marks.VARIABLE: str(self.folder / "spec.json"), "TMPDIR": str(self.folder / "tmp")}
        return {**os.environ, **own, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(workers.ROOT), **more}

    def _launch(self) -> None:
        options = ["--workers", self.job.workers, "--max-restarts", self.job.max_restarts, "--cpu"]
        options += ["--log-dir", self.folder / "logs", "-m", "tests.soak.program"]
        with open(self.folder / "launcher.txt", "wb") as file:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "tfdist", "run", *map(str, options)],
                env=self._environment(),
                cwd=workers.ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        try:
            self._watch(lambda: self.launcher.poll() is not None, LIMIT_SECONDS * (1 + self.job.max_restarts))
        finally:
            if self.launcher.poll() is None:
                self.launcher.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.launcher.wait(40)
                self.launcher.kill()
            self.outcome.exit_code = self.launcher.wait()

    def _attempts(self) -> None:
        """Starts the workers, and all again when one has failed, as a scheduler does."""
        for attempt in range(1 + self.job.max_restarts):
            self._start(attempt)
            own = {key[1]: process for key, process in self.processes.items() if key[0] == attempt}
            self._watch(lambda own=own: all(own[index].ended for index in own.keys() - self._stopped), LIMIT_SECONDS)
            for process in own.values():
                if process.ended is None:
                    process.process.kill()
                    process.handle.wait()
            for held in self._taken:
                held.close()
            codes = [process.code for process in own.values()]
            self.outcome.codes.append(codes)
            # As the launcher does: who ends because of another one is not the cause.
            self.outcome.exit_code = next(iter(sorted(filter(None, codes), key=PEER_FAILED_EXIT_CODE.__eq__)), 0)
            if self.outcome.exit_code == 0 or self.outcome.timed_out:
                return

    def _start(self, attempt: int) -> None:
        number, ports = self.job.workers, workers.free_ports(self.job.workers)
        self._ports |= set(ports)
        absent = [fault["worker"] for fault in self._all_faults if fault["act"] == "absent"]
        taken = [ports[fault["worker"]] for fault in self._all_faults if fault["act"] == "port_in_use"]
        self._taken = [socket.create_server(("", port)) for port in taken]
        names = ["localhost"] * number if self.cable is None else [self.cable.addresses[index % 2] for index in range(number)]
        addresses = [f"{name}:{port}" for name, port in zip(names, ports, strict=True)]
        for index in (index for index in range(number) if index not in absent):
            config = workers.tf_config(addresses, index)
            environment = self._environment(TFDIST_ATTEMPT=str(attempt), TFDIST_SOAK_WORKER=str(index))
            wrong = [f for f in self._all_faults if f["act"] == "wrong_config" and f["worker"] in (index, None)]
            environment = outside.changed(environment, config, wrong[0] if wrong else None)
            path = self.folder / "logs" / f"attempt_{attempt}" / f"worker_{index}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.job.launch == "fork":
                handle = forks.start(program.main, environment=environment, folder=workers.ROOT, output=path)
            else:
                command = [sys.executable, "-u", "-m", "tests.soak.program"]
                command = command if self.cable is None else self.cable.command(index % 2, command)
                with open(path, "wb") as file:
                    handle = subprocess.Popen(
                        command, env=environment, cwd=workers.ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                    )
            self.processes[attempt, index] = _Process(handle, psutil.Process(handle.pid))

    # Watching

    def _watch(self, done: Any, seconds: float) -> None:
        end = time.time() + seconds
        while not done():
            self._find_children()
            for process in self.processes.values():
                process.look()
            self._strike()
            if time.time() > end or self._is_stuck():
                self.outcome.timed_out = True
                break
            time.sleep(POLL_SECONDS)
        for process in self.processes.values():
            process.look()

    def _is_stuck(self) -> bool:
        """Whether a worker was ended or stopped long ago, and others of its attempt go on."""
        started = {attempt for attempt, _ in self.processes}
        strikes = [strike.at for strike in self.outcome.strikes if strike.ends and strike.attempt == max(started)]
        return bool(strikes) and time.time() > min(strikes) + PATIENCE_SECONDS

    def _find_children(self) -> None:
        if self.launcher is None or self.launcher.poll() is not None:
            return
        known = {process.process.pid for process in self.processes.values()}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.launcher.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                    environment = child.environ() if child.pid not in known else {}
                    if "TFDIST_ATTEMPT" in environment:
                        config = json.loads(environment["TF_CONFIG"])
                        key = int(environment["TFDIST_ATTEMPT"]), config["task"]["index"]
                        self.processes[key] = _Process(None, child)
                        self._ports |= {int(address.rpartition(":")[2]) for address in config["cluster"]["worker"]}

    def _strike(self) -> None:
        """Commits the faults whose moment has come."""
        now = time.time()
        for fault in list(self._faults):
            at = self._moment(fault)
            if at is not None and now >= at + fault["delay"]:
                self._faults.remove(fault)
                for_ever = fault["act"] == "stop" and "seconds" not in fault.get("with", {})
                passes = "seconds" in fault.get("with", {})
                strike = Strike(fault["act"], fault["attempt"], fault["worker"], now, ends=not passes, is_for_ever=for_ever)
                self.outcome.strikes.append(strike)
                self._stopped |= {fault["worker"]} if for_ever else set()
                self.later += outside.commit(self, fault)
        for at, act in list(self.later):
            if now >= at:
                self.later.remove((at, act))
                act()

    def _moment(self, fault: dict[str, Any]) -> float | None:
        """Returns when the mark was made from which the moment of `fault` is counted; None: not yet."""
        process = self.processes.get((fault["attempt"], fault["worker"]))
        if process is None or fault["mark"] == "started":
            return process and process.process.create_time()
        found = marks.read(self.folder, "marks", fault["attempt"], fault["worker"])
        return next((at for name, at in found if name == fault["mark"]), None)

    # Afterwards

    def _look_behind(self) -> None:
        """Notes what is there still, some seconds after the end: the kernel ends processes of a dead launcher on its own."""
        end = time.time() + 5
        while (left := self._left()) and time.time() < end:
            time.sleep(0.2)
        self.outcome.left = left

    def _left(self) -> list[str]:
        pids = {process.process.pid for process in self.processes.values()}
        left = [f"process {process.pid}" for process in psutil.process_iter() if self._is_ours(process)]
        listening = [c for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        left += [f"port {c.laddr.port}" for c in listening if c.laddr.port in self._ports]
        shared = [path.name for path in pathlib.Path("/dev/shm").glob("tfdist-*")]
        left += [f"/dev/shm/{name}" for name in shared if int(name.split("-")[1]) in pids]
        left += self.cable.shared_files() if self.cable is not None else []
        return left + [f"tmp/{path.name}" for path in (self.folder / "tmp").iterdir()]

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            return process.environ().get(marks.VARIABLE) == str(self.folder / "spec.json")
        return False

    def _read(self) -> None:
        outcome = self.outcome
        for path in sorted((self.folder / "logs").glob("attempt_*/*.log")):
            key = int(path.parent.name.split("_")[1]), int(path.stem.split("_")[1])
            outcome.outputs[key] = path.read_text("utf-8", errors="replace")
        if self.launcher is not None:
            outcome.outputs[-1, -1] = (self.folder / "launcher.txt").read_text("utf-8", errors="replace")
        for (attempt, worker), found in marks.read_all(self.folder, "marks").items():
            own = [(name.removeprefix("fault "), at) for name, at in found if name.startswith("fault ")]
            outcome.strikes += [Strike(name, attempt, worker, at, is_for_ever=name == "hang") for name, at in own]
        for strike in outcome.strikes:
            self._complete(strike)

    def _complete(self, strike: Strike) -> None:
        victim = self.processes[strike.attempt, strike.worker]
        found = [["started", victim.process.create_time()], *marks.read(self.folder, "marks", strike.attempt, strike.worker)]
        before = [(name, at) for name, at in found if at < strike.at and not name.startswith("fault ")]
        strike.mark, mark_at = before[-1] if before else found[0]
        strike.since = strike.at - mark_at
        others = [
            p for key, p in self.processes.items() if key[0] == strike.attempt and (p is not victim or not strike.is_for_ever)
        ]
        ends = [process.ended for process in others if process.ended is not None]
        strike.seconds = max(ends) - strike.at if ends else None
