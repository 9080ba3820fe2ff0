"""`python -m tfdist doctor ...`: examines the devices, and says whether tfdist can be trusted on them."""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import sys
import time
from typing import Any

from tfdist.doctor.examination import PARTS, all_checks
from tfdist.doctor.report import Report
from tfdist.doctor.session_arguments import add_arguments, cluster_of, examine
from tfdist.launch.arguments import add_command, positive_int

_DESCRIPTION = """\
Examines the devices of this machine, or of all workers of a TF_CONFIG job: versions, links, how fast each collective is, whether
each way of training gives one device's numbers here, and what it takes of the memory. Run it first on a new machine, and send
what `--json` writes with a report of a problem."""

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
    add_arguments(parser, "check")
    parser.add_argument("--logical-gpus", type=positive_int, metavar="N", help="split one GPU in N, and examine its parts")
    parts = f"some of the parts: {', '.join(PARTS)}"
    parser.add_argument("--only", choices=list(PARTS), nargs="+", action="extend", metavar="PART", help=parts)
    parser.add_argument("--quick", action="store_true", help="small messages, and no peak of memory: for a first look")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON, too; -: to the standard output, and no text")


def _examine(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    cluster = cluster_of(parser, args)
    if args.devices is not None and args.logical_gpus is not None:
        parser.error("argument --logical-gpus: cannot be given with --devices: it makes the devices.")
    if args.json not in (None, "-") and not pathlib.Path(args.json).absolute().parent.is_dir():
        parser.error(f"argument --json: must be a file in a directory that exists. Received: {args.json}")
    args.only = list(dict.fromkeys(args.only or ()))
    checks = all_checks(args.only or tuple(PARTS))
    started, start = datetime.datetime.now(datetime.UTC), time.monotonic()
    try:
        outcomes, is_chief = examine(args, cluster, checks)
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, TimeoutError) as error:
        print(f"tfdist doctor: {error}", file=sys.stderr)
        return 1
    report = Report(tuple(outcomes), started.isoformat(timespec="seconds"), time.monotonic() - start, _command(args))
    if is_chief:
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
