"""What is said on the screen while checks run: a line for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from tfdist.doctor.check import Check, Outcome, Result


class Progress:
    """Writes a line for each of `total` checks to `stream`; nothing where that is None."""

    def __init__(self, stream: TextIO | None, total: int):
        self._stream = stream
        self._total = total
        self._done = 0

    def at(self, outcomes: Sequence[Outcome]) -> None:
        """Says how the checks so far have ended on all workers: others may not have come as far as this one."""
        if outcomes and outcomes[-1].status.is_bad and not outcomes[-1].chief.status.is_bad:
            self._write(f"        {outcomes[-1].name} {outcomes[-1].status}: {outcomes[-1].summary}\n")
        if len(outcomes) < self._done:
            self._write("        once more, with all workers:\n")
        self._done = len(outcomes)

    def begin(self, check: Check) -> None:
        self._write(f"[{self._done + 1:2}/{self._total}] {check.name} ... ")

    def end(self, result: Result) -> None:
        self._done += 1
        self._write(f"{result.status} ({result.seconds:.1f} s): {result.summary}\n")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()
