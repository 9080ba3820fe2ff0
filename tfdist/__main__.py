"""`python -m tfdist`: the commands of `tfdist/launch/cli.py`, plans, and those that examine devices."""

import sys

from tfdist.doctor.command import add_calibrate, add_doctor
from tfdist.launch import cli
from tfdist.planning.command import add_plan


def main() -> int:
    """Runs the command of this process's arguments; returns its exit code."""
    return cli.main(more=[add_plan, add_doctor, add_calibrate])


if __name__ == "__main__":
    sys.exit(main())
