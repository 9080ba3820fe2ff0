"""Checks run in a process beside this one, so that one that crashes or hangs ends no other.

    this process                              child
    forks; asks for a result       ───▶       runs the next check
    waits for it, with a limit     ◀───       its result
    on a crash or a hang, or after an error: kills the child; the checks that are left get a new one

An error ends the child, too: after a collective has failed, no later one of that process can succeed. The child is a fork, so
that TensorFlow is imported once. That is allowed as long as this process has asked for no device: it must not.
"""

import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

from tfdist.runtime.first_line import first_line
from tfdist.tools.doctor.check import Check, LeftOutError, Result, Status
from tfdist.tools.launch.worker import death_with_parent

_LOG_LINES = 60
_LINE_LENGTH = 400
# A child that is asked where it hangs has so long to say it.
_STACK_SECONDS = 5.0
# TensorFlow's, before it aborts; and a line of Python's `faulthandler`.
_FATAL = re.compile(r"F\d{4} \S+ +\d+ (.+)")
_FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def run_in_process(
    checks: Sequence[Check], make_session: Callable[[], Any], timeout_seconds: float
) -> Generator[Result, None, None]:
    """Runs `checks` in a child, each when its result is asked for, until they are done or one is an error.

    The child is there until the generator is closed, because those of other workers may still need it.

    Args:
        make_session: makes, in the child, what every check is called with. It must not fail: what may is for a check to do.
        timeout_seconds: what each check may take.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    with tempfile.TemporaryFile("a+b") as log:
        child = context.Process(target=_run, args=(checks, make_session, there, here, log, death_with_parent()), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads at a fork: NumPy's, which handle it
            child.start()
        there.close()
        try:
            for check in checks:
                start = time.monotonic()
                result = _ask(here, timeout_seconds)
                if result is None:
                    result = _ended(child, check, time.monotonic() - start, log, timeout_seconds)
                yield result
                if result.status is Status.ERROR:
                    break
        finally:
            child.kill()
            child.join()
            here.close()


def _ask(connection: Connection, seconds: float) -> Result | None:
    """Returns the child's next result; None when it has ended, or does not send one in time."""
    try:
        connection.send(None)
        return connection.recv() if connection.poll(seconds) else None
    except (EOFError, OSError):
        return None


def _ended(child: Any, check: Check, seconds: float, log: BinaryIO, timeout_seconds: float) -> Result:
    """Returns the error of a check that has ended its process, or does not end."""
    child.join(0 if seconds >= timeout_seconds else _STACK_SECONDS)
    if child.exitcode is None:
        os.kill(child.pid, signal.SIGABRT)  # `faulthandler` writes where it stands
        child.join(_STACK_SECONDS)
        what = f"still running after {timeout_seconds:g} s (--timeout), and was ended"
    elif child.exitcode < 0:
        what = f"its process was ended by {signal.Signals(-child.exitcode).name}"
    else:
        what = f"its process ended with exit code {child.exitcode}"
    lines = _last_lines(log)
    told = lines if (child.exitcode or 0) > 0 else [match[1] for match in map(_FATAL.match, lines) if match]
    what += "".join(f"; its last words: {line}" for line in told[-1:])
    if place := _place(lines):
        what += f"; it was at {place}"
    return Result(check.name, Status.ERROR, what, seconds, log=lines)


def _last_lines(log: BinaryIO) -> tuple[str, ...]:
    log.seek(0)
    lines = [line.rstrip() for line in log.read().decode("utf-8", "replace").splitlines()]
    return tuple([line[:_LINE_LENGTH] for line in lines if line and not line.startswith("Extension modules:")][-_LOG_LINES:])


def _place(lines: Sequence[str]) -> str:
    """Returns where the main thread stood, in code of no library, of the lines that `faulthandler` wrote: it comes last."""
    threads = [number for number, line in enumerate(lines) if line.startswith(("Current thread", "Thread 0x"))]
    frames = [match for match in map(_FRAME.search, lines[threads[-1] :] if threads else []) if match]
    own = [match for match in frames if not match[1].startswith(_LIBRARIES)]
    return "".join(f"{match[1]}, line {match[2]}, in {match[3]}" for match in (own or frames)[:1])


def _run(
    checks: Sequence[Check],
    make_session: Callable[[], Any],
    parent: Connection,
    others_end: Connection,
    log: BinaryIO,
    prepare: Callable[[], None],
) -> None:
    prepare()
    others_end.close()
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    sys.stdout = sys.stderr = os.fdopen(os.dup(log.fileno()), "w", buffering=1, encoding="utf-8")
    faulthandler.enable(log)
    session = make_session()
    for check in checks:
        parent.recv()
        start = time.monotonic()
        try:
            finding = check.run(session)
            status = Status.HOLDS if finding.holds else Status.FAILS
            result = Result(check.name, status, finding.summary, time.monotonic() - start, finding.data)
        except LeftOutError as reason:
            result = Result(check.name, Status.LEFT_OUT, str(reason), time.monotonic() - start)
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)  # which tells the other workers of the job
            sys.stderr.flush()
            result = Result(check.name, Status.ERROR, first_line(error), time.monotonic() - start, log=_last_lines(log))
        parent.send(result)
    parent.recv()  # until this process is killed
