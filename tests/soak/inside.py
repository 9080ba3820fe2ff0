"""Faults that a program commits itself, at a step, in its data or at a mark: the moment is exact."""

from __future__ import annotations

import builtins
import os
import pathlib
import signal
import time
from typing import Any

from tests.soak import marks


class Faults:
    """The faults of the spec that this process is to commit.

    Each is a dictionary: "act" is what to do, "at" the place ("start", "connected", "step", "data", ...), "number" the how
    many-th step or batch, "attempt" and "worker" who; a "worker" of None is all of them.
    """

    def __init__(self) -> None:
        self._own = [
            fault
            for fault in marks.spec()["faults"]
            if fault["attempt"] in (marks.attempt(), None) and fault["worker"] in (marks.worker(), None)
        ]

    def planned(self, place: str) -> list[dict[str, Any]]:
        """Returns the faults of this process at `place`."""
        return [fault for fault in self._own if fault.get("at") == place]

    def at(self, place: str, number: int = 0) -> None:
        """Commits what is planned for here."""
        for fault in self.planned(place):
            if fault.get("number", 0) == number:
                marks.mark(f"fault {fault['act']}")
                getattr(self, f"_{fault['act']}")(**fault.get("with", {}))

    def commits(self, place: str, number: int) -> bool:
        """Whether a fault is planned for here, which the caller commits."""
        found = any(fault["number"] == number for fault in self.planned(place))
        if found:
            marks.mark(f"fault {place}")
        return found

    def _kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), number)
        time.sleep(1)  # a signal that Python handles comes between two of its instructions

    def _hang(self) -> None:
        while True:
            time.sleep(1)

    def _exit(self, code: int = 0) -> None:
        raise SystemExit(code)

    def _raise(self, kind: str = "ValueError", text: str = "the data of this worker are spoilt") -> None:
        raise getattr(builtins, kind)(text)

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _spoil_backup(self, keep: float) -> None:
        """Cuts every file of the backup, of which that part of its bytes is kept."""
        for path in sorted(pathlib.Path(marks.spec()["backup"]).rglob("*")):
            if path.is_file():
                os.truncate(path, int(keep * path.stat().st_size))
