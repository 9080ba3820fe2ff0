"""Which run of which job this process belongs to: what tells a restart after a failure from a program that is run anew.

    TFDIST_JOB                          a name that is the same in every restart of a job, and another in each new job: the
                                        launcher makes one up, the user of another scheduler may set one
    SLURM_JOB_ID, SLURM_RESTART_COUNT   of a job that SLURM may have requeued

Without either nothing is known of the job, and its name is "".
"""

import dataclasses
import functools
import os
import uuid
from typing import Any


@dataclasses.dataclass(frozen=True)
class JobRun:
    """One run of a job, as one of its processes sees it; `requeued`: how often SLURM has requeued the job, None without SLURM."""

    job: str
    requeued: int | None
    process: str

    def restarts(self, earlier: dict[str, Any]) -> bool:
        """Whether this is a restart of the job of which `earlier`, as `dataclasses.asdict` tells it, is a run."""
        if not self.job or earlier["job"] != self.job or earlier["process"] == self.process:
            return False
        return self.requeued is None or self.requeued > (earlier["requeued"] or 0)


def this_run() -> JobRun:
    """Returns the run that this process belongs to."""
    job, number = os.environ.get("TFDIST_JOB", ""), os.environ.get("SLURM_JOB_ID", "")
    if job or not number:
        return JobRun(job, None, _process())
    return JobRun(f"SLURM {number}", int(os.environ.get("SLURM_RESTART_COUNT") or 0), _process())


@functools.cache
def _process() -> str:
    return uuid.uuid4().hex
