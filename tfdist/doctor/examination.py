"""All checks, in order, on all workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdist.doctor.bandwidth import bandwidth_checks
from tfdist.doctor.check import Check, Outcome, Result, Status
from tfdist.doctor.machine import DEVICES, TOPOLOGY, VERSIONS
from tfdist.doctor.memory import memory_checks
from tfdist.doctor.parity import parity_checks
from tfdist.doctor.process import run_in_process
from tfdist.doctor.progress import Progress
from tfdist.doctor.workers import WorkerGoneError, Workers

# What the doctors of other workers may need beyond the time of their checks.
_MARGIN_SECONDS = 60.0

PARTS = {"bandwidth": bandwidth_checks, "parity": parity_checks, "memory": memory_checks}


def all_checks(parts: Sequence[str] = tuple(PARTS)) -> list[Check]:
    """Returns the checks of `parts`, behind those that tell what the machine is."""
    return [VERSIONS, TOPOLOGY, DEVICES, *(check for part in parts for check in PARTS[part]())]


def run_checks(
    checks: Sequence[Check], make_session: Callable[[], Any], timeout_seconds: float, workers: Workers, progress: Progress
) -> list[Outcome]:
    """Returns how each check has ended on all workers, in order.

    After a check that has ended its process on one worker, all workers go on with the check behind it, in new processes.

    Args:
        checks: the same on all workers.
        make_session: makes what each check is called with, in its process.
        timeout_seconds: what a check may take.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(checks):
        left = checks[len(outcomes) :]
        progress.at(outcomes)
        patience = len(left) * timeout_seconds + _MARGIN_SECONDS
        with run_in_process(left, make_session, timeout_seconds, progress.begin, progress.end) as found:
            try:
                every = workers.gather([result.to_json() for result in found], patience)
            except WorkerGoneError as gone:
                return [*outcomes, *_unrun(found, left, f"not all workers took part: {gone}")]
        done = min(map(len, every))
        outcomes += [Outcome(tuple(Result.from_json(mine[i]) for mine in every)) for i in range(done)]
        if checks[len(outcomes) - 1].is_needed and outcomes[-1].status.is_bad:
            return [*outcomes, *_unrun([], left[done:], f"not run, because {outcomes[-1].name} went wrong")]
    return outcomes


def _unrun(found: Sequence[Result], checks: Sequence[Check], reason: str) -> list[Outcome]:
    """Returns the outcomes of `checks`, of which this worker has `found` the first; the others are errors for `reason`."""
    names = [check.name for check in checks[len(found) :]]
    return [Outcome((result,)) for result in (*found, *(Result(name, Status.ERROR, reason, 0.0) for name in names))]
