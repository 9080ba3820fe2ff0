"""`python -m tfdist calibrate --out FILE`: measures the devices and links that a plan is to be made for."""

import argparse
from typing import Any

from tfdist.doctor.calibration import calibration_checks, hardware_of
from tfdist.doctor.check import Outcome
from tfdist.doctor.examination import add_arguments, examine
from tfdist.launch.arguments import add_command, output_file

_DESCRIPTION = """\
Measures the devices of this machine, or of all workers of a TF_CONFIG job, in about a minute: products of matrices at three
sizes and in each dtype, copies, the cost of an operation, each collective, a message beside a computation, an optimizer update.
`python -m tfdist plan --calibration FILE` and `tfdist.plan(..., hardware=FILE)` estimate times with what it writes."""

_EPILOG = """\
examples:
  python -m tfdist calibrate --out hardware.json                            # all GPUs, or two logical CPUs where there is none
  python -m tfdist run --workers 2 -m tfdist calibrate --out hardware.json  # a process per GPU; several machines: with TF_CONFIG

Let nothing else run meanwhile. What is being measured is told on the standard error; of a job the chief writes the file.

exit code: 0 when all could be measured, else 1; 2 for wrong arguments, 130 after Ctrl-C."""


def add_calibrate(commands: Any) -> None:
    """Adds the command to those of the program."""
    parser = add_command(
        commands, "calibrate", _calibrate, help="measure devices and links, for plans", description=_DESCRIPTION, epilog=_EPILOG
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
