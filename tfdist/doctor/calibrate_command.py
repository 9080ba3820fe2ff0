"""`python -m tfdist calibrate --out FILE`: measures the devices and links that a plan is to be made for."""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from typing import Any

from tfdist.doctor.calibration import calibration_checks, hardware_of
from tfdist.doctor.examination import Examination
from tfdist.doctor.progress import Progress
from tfdist.doctor.session import Session
from tfdist.doctor.workers import Workers
from tfdist.launch.arguments import add_command, positive_int, seconds
from tfdist.runtime import read_cluster

_DESCRIPTION = """\
Measures the devices of this machine, or of all workers of a TF_CONFIG job, in about a minute: products of matrices at three sizes
and in each dtype, copies, the cost of an operation, each collective, a message beside a computation, an optimizer update.
`python -m tfdist plan --calibration FILE` and `tfdist.plan(..., hardware=FILE)` estimate times with what it writes."""

_EPILOG = """\
examples:
  python -m tfdist calibrate --out hardware.json                            # all GPUs, or two logical CPUs where there is none
  python -m tfdist run --workers 2 -m tfdist calibrate --out hardware.json  # a process per GPU; several machines: with TF_CONFIG

Let nothing else run meanwhile. What is being measured is told on the standard error; of a job the chief writes the file.

exit code: 0 when all could be measured, else 1; 2 for wrong arguments, 130 after Ctrl-C."""

_START_SECONDS = 300.0


def add_calibrate(commands: Any) -> None:
    """Adds the command to those of the program."""
    parser = add_command(
        commands, "calibrate", _calibrate, help="measure devices and links, for plans", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE", help="where to write it, as JSON")
    parser.add_argument(
        "--devices",
        type=positive_int,
        metavar="N",
        help="how many GPUs, or logical CPUs where there is no GPU (default: all, or 2)",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=120.0, metavar="S", help="seconds that one measurement may take (default: 120)"
    )


def _calibrate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if not args.out.absolute().parent.is_dir():
        parser.error(f"argument --out: must be a file in a directory that exists. Received: {args.out}")
    try:
        cluster = read_cluster()
    except ValueError as error:
        parser.error(str(error))
    if cluster is not None and args.devices is not None:
        parser.error("argument --devices: not in a job of several workers. Use --devices-per-worker of `python -m tfdist run`.")
    checks = calibration_checks()
    make_session = functools.partial(Session, args.devices, False, args.timeout)
    try:
        workers = Workers(cluster, _START_SECONDS)
        progress = Progress(sys.stderr if workers.is_chief else None, len(checks))
        try:
            outcomes = Examination(checks, make_session, args.timeout).run(workers, progress)
        finally:
            workers.close()
        hardware = hardware_of(outcomes)
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, TimeoutError) as error:
        print(f"tfdist calibrate: {error}", file=sys.stderr)
        return 1
    if workers.is_chief:
        hardware.to_file(args.out)
        print(f"{hardware.name}: {args.out}")
    return 0
