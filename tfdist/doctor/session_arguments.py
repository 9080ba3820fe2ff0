"""What the commands that examine devices are told of them, and the examination that follows."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Sequence

from tfdist.doctor.check import Check, Outcome
from tfdist.doctor.examination import run_checks
from tfdist.doctor.progress import Progress
from tfdist.doctor.session import Session
from tfdist.doctor.workers import Workers
from tfdist.launch.arguments import positive_int, seconds
from tfdist.runtime import read_cluster

# How long to wait for the other workers.
_START_SECONDS = 300.0


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


def examine(parser: argparse.ArgumentParser, args: argparse.Namespace, checks: Sequence[Check]) -> tuple[list[Outcome], bool]:
    """Returns how `checks` have ended on all workers, and whether this worker is the chief.

    Raises:
        SystemExit: TF_CONFIG or the arguments are wrong.
        RuntimeError: this worker's port is in use.
        TimeoutError: workers are missing.
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
    make_session = functools.partial(Session, args.devices, args.quick, args.timeout, args.logical_gpus)
    with contextlib.closing(Workers(cluster, _START_SECONDS)) as workers:
        progress = Progress(sys.stderr if workers.is_chief else None, len(checks))
        return run_checks(checks, make_session, args.timeout, workers, progress), workers.is_chief
