"""What the commands that examine devices are told of them, and the examination that follows."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

from tfdist.doctor.check import Check, Outcome
from tfdist.doctor.examination import Examination
from tfdist.doctor.progress import Progress
from tfdist.doctor.session import Session
from tfdist.doctor.workers import Workers
from tfdist.launch.arguments import positive_int, seconds
from tfdist.runtime import Cluster, read_cluster

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


def cluster_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Cluster | None:
    """Returns the workers of the job, if there is one; ends the program where TF_CONFIG or the arguments are wrong."""
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
    return cluster


def examine(args: argparse.Namespace, cluster: Cluster | None, checks: Sequence[Check]) -> tuple[list[Outcome], bool]:
    """Returns how `checks` have ended on all workers, and whether this worker is the chief.

    Raises:
        RuntimeError: this worker's port is in use.
        TimeoutError: workers are missing.
    """
    workers = Workers(cluster, _START_SECONDS)
    progress = Progress(sys.stderr if workers.is_chief else None, len(checks))
    make_session = functools.partial(Session, args.devices, args.quick, args.timeout, args.logical_gpus)
    try:
        return Examination(checks, make_session, args.timeout).run(workers, progress), workers.is_chief
    finally:
        workers.close()
