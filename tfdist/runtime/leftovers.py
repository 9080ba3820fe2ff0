"""Files that a job leaves for its own restarts: a worker tells the launcher of them, which removes them when no restart can come.

The launcher's variable TFDIST_LEFTOVERS is "descriptor:inode" of a pipe. A process that has inherited the variable without the
pipe has another file under that number, or none, and tells nothing.
"""

import contextlib
import json
import os

_VARIABLE = "TFDIST_LEFTOVERS"


def remove_after_success(path: str) -> None:
    """Has the launcher remove the file at `path` when the job has succeeded; does nothing where there is no launcher."""
    descriptor, _, inode = os.environ.get(_VARIABLE, "").partition(":")
    if not descriptor:
        return
    with contextlib.suppress(OSError):
        if os.fstat(int(descriptor)).st_ino == int(inode):
            os.write(int(descriptor), f"{json.dumps(os.path.abspath(path))}\n".encode())


def environment_of(descriptor: int) -> dict[str, str]:
    """Returns the variable by which a worker finds the pipe whose writing end, here and in the worker, is `descriptor`."""
    return {_VARIABLE: f"{descriptor}:{os.fstat(descriptor).st_ino}"}


def parse_leftovers(data: bytes) -> list[str]:
    """Returns the paths in what was read from the pipe; what is torn is left out."""
    paths = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            paths.append(json.loads(line))
    return paths
