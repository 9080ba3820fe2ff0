"""Faults that are committed from outside, by a signal or to what a process stands on: its disk, its cable, its environment."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.soak.running import Run

OF_ALL = ("cable", "launcher", "kill_all", "full_disk", "room_on_disk", "read_only_disk")  # acts that hit no single worker
Later = list[tuple[float, Callable[[], None]]]


def commit(run: Run, fault: dict[str, Any]) -> Later:
    """Commits `fault`; returns what has to be done later, and when: the end of a pause."""
    return globals()[f"_{fault['act']}"](run, fault["attempt"], fault["worker"], **fault.get("with", {})) or []


def _send(run: Run, attempt: int, worker: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        run.processes[attempt, worker].send(number)


def _kill(run: Run, attempt: int, worker: int) -> None:
    _send(run, attempt, worker, signal.SIGKILL)


def _kill_all(run: Run, attempt: int, worker: int) -> None:
    for index in range(run.job.workers):
        _send(run, attempt, index, signal.SIGKILL)


def _terminate(run: Run, attempt: int, worker: int) -> None:
    _send(run, attempt, worker, signal.SIGTERM)


def _interrupt(run: Run, attempt: int, worker: int) -> None:
    _send(run, attempt, worker, signal.SIGINT)


def _stop(run: Run, attempt: int, worker: int, seconds: float | None = None) -> Later:
    _send(run, attempt, worker, signal.SIGSTOP)
    return [] if seconds is None else [(time.time() + seconds, functools.partial(_send, run, attempt, worker, signal.SIGCONT))]


def _launcher(run: Run, attempt: int, worker: int, number: int) -> None:
    run.launcher.send_signal(number)


def _full_disk(run: Run, attempt: int, worker: int, free: int = 0) -> None:
    run.disk.fill(free)


def _room_on_disk(run: Run, attempt: int, worker: int) -> None:
    run.disk.empty()


def _read_only_disk(run: Run, attempt: int, worker: int) -> Later:
    try:
        run.disk.remount("ro")
    except subprocess.CalledProcessError:  # a file is being written at this moment
        return [(time.time() + 0.02, functools.partial(_again, run, attempt, worker))]
    return []


def _again(run: Run, attempt: int, worker: int) -> None:
    for at, act in _read_only_disk(run, attempt, worker):
        run.later.append((at, act))


def _writable_disk(run: Run, attempt: int, worker: int) -> None:
    run.disk.remount("rw")


def _cable(run: Run, attempt: int, worker: int, do: str, host: int = 0, seconds: float | None = None) -> Later:
    getattr(run.cable, do)(*([] if do == "pull" else [host]))
    return [] if seconds is None else [(time.time() + seconds, run.cable.mend)]


def changed(environment: dict[str, str], config: dict[str, Any], fault: dict[str, Any] | None) -> dict[str, str]:
    """Returns a worker's environment, with its TF_CONFIG, wrong where there is a `fault`."""
    if fault is None:
        return {**environment, "TF_CONFIG": json.dumps(config)}
    for path, value in fault["with"].get("set", {}).items():
        *parts, last = path.split("/")
        place = functools.reduce(lambda found, part: found[part], parts, config)
        place[int(last) if isinstance(place, list) else last] = value
    for path in fault["with"].get("drop", []):
        del config[path]
    return {**environment, "TF_CONFIG": fault["with"].get("text", json.dumps(config))}


class Disk:
    """A small file system of its own, in memory, for the time in which it is entered; none unless `wanted`."""

    def __init__(self, folder: pathlib.Path, *, wanted: bool):
        self.folder = folder
        self.wanted = wanted

    def __enter__(self) -> Disk:
        if self.wanted:
            self.folder.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", self.folder], check=True, capture_output=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self.wanted:
            subprocess.run(["umount", "--lazy", self.folder], check=True)

    def fill(self, free: int) -> None:
        """Leaves `free` bytes, in steps of a page."""
        with contextlib.suppress(OSError), open(self.folder / "ballast", "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        if free:
            with open(self.folder / "ballast", "rb+") as file:
                file.truncate(max(0, (self.folder / "ballast").stat().st_size - free))

    def empty(self) -> None:
        (self.folder / "ballast").unlink()

    def remount(self, how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", self.folder], check=True, capture_output=True)
