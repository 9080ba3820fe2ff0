"""`python -m tfdist`: the commands of `tfdist/tools/launch/cli.py`, schedules, plans, and those that examine devices."""

import sys

from tfdist.tools.doctor.command import add_calibrate, add_doctor
from tfdist.tools.launch import cli
from tfdist.tools.launch.schedule_command import add_schedule
from tfdist.tools.planning.command import add_plan


def main() -> int:
    """Runs the command of this process's arguments; returns its exit code."""
    return cli.main(more=[add_schedule, add_plan, add_doctor, add_calibrate])


if __name__ == "__main__":
    sys.exit(main())
