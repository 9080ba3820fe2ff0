"""Processes that begin with TensorFlow imported: forks of one that has imported it, which is most of what a small worker costs.

They end as programs end, with `sys.excepthook` and the functions registered with `atexit`, but without the interpreter's
teardown: a test of that starts a program of its own.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

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
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start(
    function: Callable[..., None], *arguments: Any, environment: dict[str, str], folder: pathlib.Path, output: pathlib.Path
) -> Fork:
    """Calls `function` in a process of its own.

    Args:
        function: of a module that the process can import.
        arguments: of `function`; pickled.
        environment: all variables of the process. Those that TensorFlow reads when it is imported come too late.
        folder: where it runs.
        output: the file that gets what it prints and its errors.
    """
    output.touch()
    process = _context.Process(target=_run, args=(function, arguments, environment, str(folder), str(output)))
    process.start()
    return Fork(process)


def _run(function: Callable[..., None], arguments: tuple, environment: dict[str, str], folder: str, output: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    file = os.open(output, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
