"""The rows of a part: what they are, and running each so that one which fails, crashes or hangs costs no other."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.cases import Case
from benchmarks.job import Job, JobError
from benchmarks.one_card.card import Card
from benchmarks.peers import start
from tfdist.tools.doctor.check import Check, Finding, LeftOutError, Result, Status
from tfdist.tools.doctor.process import run_in_process


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a part's table.

    Attributes:
        name: what is tried.
        run: called with the `Card` in a process beside this one; returns what was found, raises `LeftOutError` with the reason
            where it does not apply.
        peer: in the place of `run`, a case of PyTorch, whose processes this one starts; `judge` is given the `Job`.
        judge: returns what was found.
    """

    name: str
    run: Callable[[Card], Finding] | None = None
    peer: Case | None = None
    judge: Callable[[Job], Finding] | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows that share a table.

    Attributes:
        name: of the part.
        rows: in order of worth.
        shares_process: whether rows run in one process as long as none fails; else each has its own.
        columns: by heading, what a cell is, of a row's record.
        text: what the table shows, in a line or two.
        seconds: how long the part may take on a card; rows that would begin later are left out.
        row_seconds: how long one row may take on a card, after which it is ended.
        relate: given a row's result and those before it, returns the result, with what only a comparison tells.
    """

    name: str
    rows: Sequence[Row]
    shares_process: bool
    columns: dict[str, Callable[[dict[str, Any]], str | None]]
    text: str
    seconds: float
    row_seconds: float
    relate: Callable[[Result, Sequence[Result]], Result] = lambda result, before: result


def run_part(part: Part, card: Card, args: Any, tell: Callable[[Result], None], stop: float = math.inf) -> None:
    """Tells how each row has ended, in order, as soon as it has.

    Args:
        part: what is run.
        card: what the rows are given.
        args: of the program: of PyTorch's rows `torch`, `torch_python` and `torch_preload`.
        tell: given each result.
        stop: when nothing more may begin, and what runs in a process of its own is ended; in seconds of `time.monotonic`.
    """
    end = min(time.monotonic() + card.patience * part.seconds, stop)
    left = list(part.rows)
    while left:
        row_seconds = min(card.patience * part.row_seconds, max(1.0, stop - time.monotonic()))
        if left[0].peer is not None:
            tell(_run_peer(left.pop(0), args, row_seconds, end))
            continue
        together = [row for row in left if row.peer is None] if part.shares_process else left[:1]
        checks = [Check(row.name, _in_time(row, end)) for row in together]
        for result in run_in_process(checks, lambda: card, row_seconds):
            tell(result)
            del left[0]


def _in_time(row: Row, end: float) -> Callable[[Card], Finding]:
    def run(card: Card) -> Finding:
        if time.monotonic() > end:
            raise LeftOutError("no time was left for it")
        return row.run(card)

    return run


def _run_peer(row: Row, args: Any, seconds: float, end: float) -> Result:
    began = time.monotonic()
    if began > end:
        return Result(row.name, Status.LEFT_OUT, "no time was left for it", 0.0)
    if args.torch is None:
        return Result(row.name, Status.LEFT_OUT, "there is no PyTorch (--torch-python)", 0.0)
    args.timeout_seconds = seconds
    try:
        with start("rounds", row.peer, args) as job:
            finding = row.judge(job)
    except JobError as error:
        return Result(row.name, Status.ERROR, error.reason, time.monotonic() - began, log=tuple(str(error).splitlines()[-60:]))
    status = Status.HOLDS if finding.holds else Status.FAILS
    return Result(row.name, status, finding.summary, time.monotonic() - began, finding.data)
