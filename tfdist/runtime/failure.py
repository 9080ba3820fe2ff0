"""The end of a job, as workers tell it each other and print it at last."""

import dataclasses
import os
import sys
from typing import Any

from tfdist.runtime.cluster import Cluster


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure that ended the job."""

    worker_index: int | None  # the worker it started on; None: all wait for each other, and none is behind
    what: str  # a clause about this worker ("raised ValueError: ..."), or a sentence's beginning where there is none
    is_of_program: bool = False  # whether the program, or what it stands on, is at fault: a restart would fail again

    def to_word(self) -> dict[str, Any]:
        return {"failed": dataclasses.asdict(self)}

    @classmethod
    def from_word(cls, word: dict[str, Any]) -> "Failure":
        """Returns the failure of which another worker has sent `word`."""
        return cls(**word["failed"])

    def message(self, cluster: Cluster) -> str:
        """Returns what a worker says of it."""
        here = cluster.worker_index
        if self.worker_index is None:
            who = self.what
        else:
            which = "This worker" if self.worker_index == here else f"Worker {self.worker_index}"
            who = f"{which}, {cluster.tasks[self.worker_index]}, {self.what}"
        again = "Mend that, and start the job again" if self.is_of_program else "Start the job again"
        return (
            f"tfdist: {who}. {cluster.task} ends too: no worker can train without the others. {again}; with "
            "`keras.callbacks.BackupAndRestore` it continues from its last backup."
        )

    def say(self, cluster: Cluster) -> None:
        """Prints it, after all that was printed before."""
        _flush()
        print(self.message(cluster), file=sys.stderr, flush=True)


def end_process(code: int) -> None:
    """Ends this process at once, whatever its threads do."""
    _flush()
    os._exit(code)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
