"""`python -m tfdist doctor ...`: examines the devices, and says whether tfdist can be trusted on them."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import pathlib
import sys
import time
from typing import Any

from tfdist.doctor.examination import PARTS, Examination, all_checks
from tfdist.doctor.progress import Progress
from tfdist.doctor.report import Report
from tfdist.doctor.session import Session
from tfdist.doctor.workers import Workers
from tfdist.launch.arguments import add_command, positive_int, seconds
from tfdist.runtime import read_cluster

_DESCRIPTION = """\
Examines the devices of this machine, or of all workers of a TF_CONFIG job: versions, links, how fast each collective is, whether
each way of training gives one device's numbers here, and what it takes of the memory. Run it first on a new machine, and send
what `--json` writes with a report of a problem."""

# How long to wait for the doctors of the other workers.
_START_SECONDS = 300.0

_EPILOG = """\
examples:
  python -m tfdist doctor                                      # all GPUs, or two logical CPUs where there is none
  python -m tfdist doctor --devices 4 --only bandwidth
  python -m tfdist doctor --json doctor.json
  python -m tfdist run --workers 2 -m tfdist doctor            # a process per GPU; several machines: with TF_CONFIG on each

The report goes to the standard output, of a job the chief's only, and what is being done to the standard error.
A check that crashes or does not end is reported; the others still run.

exit code: 0 when all holds, else 1; 2 for wrong arguments, 130 after Ctrl-C."""


def add_doctor(commands: Any) -> None:
    """Adds the command to those of the program."""
    parser = add_command(
        commands,
        "doctor",
        _examine,
        help="examine the devices: versions, links, bandwidth, parity, memory",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--devices",
        type=positive_int,
        metavar="N",
        help="how many GPUs, or logical CPUs where there is no GPU (default: all, or 2)",
    )
    parser.add_argument("--logical-gpus", type=positive_int, metavar="N", help="split one GPU in N, and examine its parts")
    parts = f"some of the parts: {', '.join(PARTS)}"
    parser.add_argument("--only", choices=list(PARTS), nargs="+", action="extend", metavar="PART", help=parts)
    parser.add_argument("--quick", action="store_true", help="small messages, and no peak of memory: for a first look")
    parser.add_argument(
        "--timeout", type=seconds, default=120.0, metavar="S", help="seconds that one check may take (default: 120)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON, too; -: to the standard output, and no text")


def _examine(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        cluster = read_cluster()
    except ValueError as error:
        parser.error(str(error))
    for name in ("devices", "logical_gpus"):
        option = f"--{name.replace('_', '-')}"
        if cluster is not None and getattr(args, name) is not None:
            launchers = {"devices": "--devices-per-worker"}.get(name, option)
            parser.error(f"argument {option}: not in a job of several workers. Use {launchers} of `python -m tfdist run`.")
    if args.devices is not None and args.logical_gpus is not None:
        parser.error("argument --logical-gpus: cannot be given with --devices: it makes the devices.")
    if args.json not in (None, "-") and not pathlib.Path(args.json).absolute().parent.is_dir():
        parser.error(f"argument --json: must be a file in a directory that exists. Received: {args.json}")
    args.only = list(dict.fromkeys(args.only or ()))
    checks = all_checks(args.only or tuple(PARTS))
    make_session = functools.partial(Session, args.devices, args.quick, args.timeout, args.logical_gpus)
    started, start = datetime.datetime.now(datetime.UTC), time.monotonic()
    try:
        workers = Workers(cluster, _START_SECONDS)
    except (RuntimeError, TimeoutError) as error:
        print(f"tfdist doctor: {error}", file=sys.stderr)
        return 1
    progress = Progress(sys.stderr if workers.is_chief else None, len(checks))
    try:
        outcomes = Examination(checks, make_session, args.timeout).run(workers, progress)
    except KeyboardInterrupt:
        return 130
    finally:
        workers.close()
    report = Report(tuple(outcomes), started.isoformat(timespec="seconds"), time.monotonic() - start, _command(args))
    if workers.is_chief:
        _publish(report, args.json)
    return 0 if report.holds else 1


def _command(args: argparse.Namespace) -> tuple[str, ...]:
    told = [f"--devices {args.devices}"] if args.devices else []
    told += [f"--logical-gpus {args.logical_gpus}"] if args.logical_gpus else []
    told += [f"--only {' '.join(args.only)}"] if args.only else []
    return (*told, *(["--quick"] if args.quick else []))


def _publish(report: Report, file: str | None) -> None:
    text = json.dumps(report.to_json(), indent=2)
    if file == "-":
        print(text)
        return
    print(report)
    if file is not None:
        pathlib.Path(file).write_text(f"{text}\n", encoding="utf-8")
