"""Checks of a command, in order, on all workers: the command's arguments, the course, and the exit code."""

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.runtime import read_cluster
from tfdist.tools.doctor.check import Check, Outcome, Result, Status
from tfdist.tools.doctor.process import run_in_process
from tfdist.tools.doctor.session import Session
from tfdist.tools.doctor.workers import WorkerGoneError, Workers
from tfdist.tools.launch.arguments import positive_int, seconds

# How long to wait for the other workers: at the start, and beyond the time of a check.
_START_SECONDS = 300.0
_MARGIN_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser, one: str) -> None:
    """Adds the arguments of a session; `one` is what is timed, such as "check"."""
    parser.add_argument(
        "--devices",
        type=positive_int,
        metavar="N",
        help="how many GPUs, or logical CPUs where there is no GPU (default: all, or 2)",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=120.0, metavar="S", help=f"seconds that one {one} may take (default: 120)"
    )
    parser.set_defaults(logical_gpus=None, quick=False)


def examine(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    checks: Sequence[Check],
    conclude: Callable[[list[Outcome], bool], int],
) -> int:
    """Returns the exit code, that of `conclude`, which is given how `checks` have ended, and whether this worker is the chief.

    Raises:
        SystemExit: TF_CONFIG or the arguments are wrong.
    """
    try:
        cluster = read_cluster()
    except ValueError as error:
        parser.error(str(error))
    for given, option, instead in (
        (args.devices, "--devices", "--devices-per-worker"),
        (args.logical_gpus, "--logical-gpus", "--logical-gpus"),
    ):
        if cluster is not None and given is not None:
            parser.error(f"argument {option}: not in a job of several workers. Use {instead} of `python -m tfdist run`.")
    is_chief = cluster is None or cluster.is_chief
    make_session = functools.partial(Session, args.devices, args.quick, args.timeout, args.logical_gpus)
    try:
        with contextlib.closing(Workers(cluster, _START_SECONDS)) as workers:
            outcomes = run_checks(checks, make_session, args.timeout, workers, _tell if is_chief else lambda _: None)
        return conclude(outcomes, is_chief)
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, TimeoutError, WorkerGoneError) as error:
        print(f"{parser.prog.removeprefix('python -m ')}: {error}", file=sys.stderr)
        return 1


def _tell(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def run_checks(
    checks: Sequence[Check],
    make_session: Callable[[], Any],
    timeout_seconds: float,
    workers: Workers,
    tell: Callable[[str], None],
) -> list[Outcome]:
    """Returns how each check has ended on all workers, in order.

    Workers begin a check together. After one that has ended its process on one of them, all go on in new processes.

    Args:
        checks: the same on all workers.
        make_session: makes what each check is called with, in its process.
        timeout_seconds: what a check may take.
        tell: given a line for each check, in pieces.
    """
    outcomes: list[Outcome] = []
    while left := checks[len(outcomes) :]:
        with contextlib.closing(run_in_process(left, make_session, timeout_seconds)) as results:
            for number, check in enumerate(left, len(outcomes) + 1):
                tell(f"[{number:2}/{len(checks)}] {check.name} ... ")
                result = next(results)
                tell(f"{result.status} ({result.seconds:.1f} s): {result.summary}\n")
                try:
                    every = workers.gather(result.to_json(), timeout_seconds + _MARGIN_SECONDS)
                except WorkerGoneError as gone:
                    outcomes.append(Outcome((result,)))
                    return [*outcomes, *_unrun(checks[number:], f"not all workers took part: {gone}")]
                outcome = Outcome(tuple(map(Result.from_json, every)))
                outcomes.append(outcome)
                if outcome.status.is_bad and not result.status.is_bad:
                    tell(f"        {outcome.name} {outcome.status}: {outcome.summary}\n")
                if outcome.status.is_bad and check.is_needed:
                    return [*outcomes, *_unrun(checks[number:], f"not run, because {check.name} went wrong")]
                if outcome.status is Status.ERROR:
                    break
    return outcomes


def _unrun(checks: Sequence[Check], reason: str) -> list[Outcome]:
    return [Outcome((Result(check.name, Status.ERROR, reason, 0.0),)) for check in checks]
