"""Processes that begin with TensorFlow imported: forks of one that has imported it, which is most of what a small worker costs.

They end as programs end, with `sys.excepthook` and the functions registered with `atexit`, but without the interpreter's
teardown: a test of that starts a program of its own.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tests import fork_coverage

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preloaded"])


class Fork:
    """A started process, with the names of `subprocess.Popen`."""

    def __init__(self, process: Any):
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        """Returns the exit code, minus the number of the signal that ended it, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.poll()

    def kill(self) -> None:
        self._process.kill()


def start(
    function: Callable[..., Any],
    *arguments: Any,
    environment: dict[str, str],
    folder: pathlib.Path,
    output: pathlib.Path,
    errors: pathlib.Path | None = None,
) -> Fork:
    """Calls `function` in a process of its own.

    Args:
        function: of a module that the process can import.
        arguments: of `function`; pickled.
        environment: all variables of the process. Those that TensorFlow reads when it is imported come too late.
        folder: where it runs.
        output: the file that gets what it prints.
        errors: the file that gets what it writes to its standard error; None: `output`.
    """
    files = [str(output), str(errors or output)]
    for path in files:
        pathlib.Path(path).write_bytes(b"")
    process = _context.Process(target=_run, args=(function, arguments, environment, str(folder), files))
    process.start()
    return Fork(process)


def _run(function: Callable[..., Any], arguments: tuple, environment: dict[str, str], folder: str, files: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.stdout.reconfigure(line_buffering=True)
    np.random.seed()  # or every fork would draw the same numbers
    code = 0
    try:
        function(*arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    fork_coverage.write()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
