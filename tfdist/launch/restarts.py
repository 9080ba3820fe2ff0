"""A job with its restarts: attempts, until one succeeds or there are no more."""

from __future__ import annotations

import itertools
import sys

from tfdist.launch.job import Attempt, Job
from tfdist.launch.output import say
from tfdist.launch.signals import Signals

DELAY_SECONDS = 1.0
USAGE_EXIT_CODE = 2


def run_job(job: Job) -> int:
    """Runs `job` to its end and returns the exit code for the launcher. Call it in the main thread.

    After a failure all workers are started again on new ports; the script itself goes on from its last backup. A job is not
    restarted after a signal to the launcher, nor after exit code 2, which says that the script's arguments are wrong.
    """
    with Signals() as signals:
        for number in itertools.count():
            outcome = Attempt(job, number, signals).run()
            is_last = outcome.exit_code == 0 or outcome.stopped or number + 1 == job.attempts
            if outcome.exit_code == USAGE_EXIT_CODE and not is_last:
                is_last = True
                say("not restarting: exit code 2 says that the script's arguments are wrong")
            if outcome.failure:
                sys.stderr.write(outcome.failure + "\n")
            if is_last:
                return outcome.exit_code
            say(f"restarting, attempt {number + 2} of {job.attempts}, from the last backup the script made")
            if received := signals.wait(DELAY_SECONDS):
                say(f"stopped by {received[0].name}")
                return 128 + received[0]
    raise AssertionError("unreachable: attempts are counted without an end")
