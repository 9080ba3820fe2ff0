"""`python -m tfdist doctor ...` says whether tfdist can be trusted on the devices; `calibrate` measures them, for plans."""

import argparse
import datetime
import time
from collections.abc import Sequence
from typing import Any

from tfdist.tools.doctor.bandwidth import bandwidth_checks
from tfdist.tools.doctor.calibration import calibration_checks, hardware_of
from tfdist.tools.doctor.check import Check, Outcome
from tfdist.tools.doctor.examination import add_arguments, examine
from tfdist.tools.doctor.machine import DEVICES, TOPOLOGY, VERSIONS
from tfdist.tools.doctor.memory import memory_checks
from tfdist.tools.doctor.parity import parity_checks
from tfdist.tools.doctor.report import Report
from tfdist.tools.launch.arguments import add_command, output_file, positive_int, publish

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

PARTS = {"bandwidth": bandwidth_checks, "parity": parity_checks, "memory": memory_checks}


def all_checks(parts: Sequence[str] = tuple(PARTS)) -> list[Check]:
    """Returns the checks of `parts`, after those that tell what the machine is."""
    return [VERSIONS, TOPOLOGY, DEVICES, *(check for part in parts for check in PARTS[part]())]


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
    text = "write the report as JSON, too; -: to the standard output, and no text"
    parser.add_argument("--json", type=output_file, metavar="FILE", help=text)


def _examine(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.devices is not None and args.logical_gpus is not None:
        parser.error("argument --logical-gpus: cannot be given with --devices: it makes the devices.")
    args.only = list(dict.fromkeys(args.only or ()))
    given = {"--devices": args.devices, "--logical-gpus": args.logical_gpus, "--only": " ".join(args.only)}
    command = (*(f"{name} {value}" for name, value in given.items() if value), *(["--quick"] if args.quick else []))
    started, start = datetime.datetime.now(datetime.UTC), time.monotonic()

    def conclude(outcomes: list[Outcome], is_chief: bool) -> int:
        report = Report(tuple(outcomes), started.isoformat(timespec="seconds"), time.monotonic() - start, command)
        if is_chief:
            publish(report, args.json)
        return 0 if report.holds else 1

    return examine(parser, args, all_checks(args.only or tuple(PARTS)), conclude)


_CALIBRATION = """\
Measures the devices of this machine, or of all workers of a TF_CONFIG job, in about a minute: products of matrices at three
sizes and in each dtype, copies, the cost of an operation, each collective, a message beside a computation, an optimizer update.
`python -m tfdist plan --calibration FILE` and `tfdist.plan(..., hardware=FILE)` estimate times with what it writes."""

_CALIBRATION_EPILOG = """\
examples:
  python -m tfdist calibrate --out hardware.json                            # all GPUs, or two logical CPUs where there is none
  python -m tfdist run --workers 2 -m tfdist calibrate --out hardware.json  # a process per GPU; several machines: with TF_CONFIG

Let nothing else run meanwhile. What is being measured is told on the standard error; of a job the chief writes the file.

exit code: 0 when all could be measured, else 1; 2 for wrong arguments, 130 after Ctrl-C."""


def add_calibrate(commands: Any) -> None:
    """Adds the command to those of the program."""
    parser = add_command(
        commands,
        "calibrate",
        _calibrate,
        help="measure devices and links, for plans",
        description=_CALIBRATION,
        epilog=_CALIBRATION_EPILOG,
    )
    parser.add_argument("--out", type=output_file, required=True, metavar="FILE", help="where to write it, as JSON")
    add_arguments(parser, "measurement")


def _calibrate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    def conclude(outcomes: list[Outcome], is_chief: bool) -> int:
        hardware = hardware_of(outcomes)
        if is_chief:
            hardware.to_file(args.out)
            print(f"{hardware.name}: {args.out}")
        return 0

    return examine(parser, args, calibration_checks(), conclude)
