"""What is measured, the child process that measures it, and how results are shown. Imports no TensorFlow.

Every case runs in a child process of its own: a fresh TensorFlow, whose environment is set before it is imported.
Parent and child talk in JSON lines: the parent sends the case, the child answers when it is ready, and then once per
request.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

SINGLE, MIRRORED = "single", "mirrored"
ZERO_STAGES = {f"zero{stage}": stage for stage in range(4)}
CONTENDERS = (SINGLE, MIRRORED, *ZERO_STAGES)
MODELS = ("mlp", "gpt")
LOOPS = ("function", "fit")

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_STDERR_TAIL = 2000  # characters of a failed child's stderr to show


@dataclasses.dataclass(frozen=True)
class Case:
    """One contender on one model.

    Attributes:
        contender: "single" (no strategy), "mirrored" (`tf.distribute.MirroredStrategy`) or "zero0" to "zero3"
            (`tfdist.ShardedStrategy`).
        model: "mlp", a stack of square Dense layers, or "gpt", a decoder.
        devices: logical CPUs; a "single" contender uses the first and makes no others.
        layers: Dense layers, or decoder blocks.
        width: units of a Dense layer, or the embedding's size.
        global_batch_size: examples of one step, over all devices.
        loop: "function" (a `tf.function` around `strategy.run`) or "fit" (`model.fit`).
        bucket_bytes, prefetch: passed to `ShardedStrategy`; None: its own defaults.
        heads, sequence_length, vocabulary: of the gpt.
    """

    contender: str
    model: str
    devices: int
    layers: int
    width: int
    global_batch_size: int
    loop: str
    bucket_bytes: int | None = None
    prefetch: int | None = None
    heads: int = 4
    sequence_length: int = 64
    vocabulary: int = 1000

    @property
    def num_ranks(self) -> int:
        return 1 if self.contender == SINGLE else self.devices

    @property
    def label(self) -> str:
        return self.contender if self.contender == SINGLE else f"{self.contender} x{self.devices}"


class ChildError(RuntimeError):
    """A child died, hung or reported an error.

    Args:
        reason: one line.
        stderr: the end of what the child wrote there.
    """

    def __init__(self, reason: str, stderr: str = ""):
        super().__init__(f"{reason}\n{stderr}".strip())
        self.reason = reason


class Child:
    """A process that runs one case: `python -m benchmarks.child JOB`.

        with Child("memory", case, environment={}, timeout_seconds=600) as child:
            child.ready                        # what it said when it was ready
            child.ask({"steps": 5})            # one answer per request

    A child that does not answer in time is killed, by its own process id.

    Args:
        job: what it measures, see `benchmarks.child`.
        case: what it measures it on.
        environment: variables set in the child beside those every child gets.
        timeout_seconds: longest wait for one answer.

    Raises:
        ChildError: on entering or asking, when the child dies, hangs or reports an error.
    """

    def __init__(self, job: str, case: Case, *, environment: dict[str, str], timeout_seconds: float):
        self._case = case
        self._timeout_seconds = timeout_seconds
        self._stderr = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 (closed by `close`)
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        fixed = {
            "CUDA_VISIBLE_DEVICES": "-1",
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **fixed, **environment},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._collect, daemon=True).start()
        try:
            self.ready = self.ask(dataclasses.asdict(case))
        except BaseException:
            self.close()
            raise

    def _collect(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends `request` and returns the answer."""
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=self._timeout_seconds)
        except queue.Empty:
            self._process.kill()
            reason = f"{self._case.label}: no answer in {self._timeout_seconds:g} s, killed"
            raise ChildError(reason, self._stderr_tail()) from None
        except BrokenPipeError:
            line = None
        if line is None:
            code = self._process.wait()
            raise ChildError(f"{self._case.label}: ended with exit code {code}", self._stderr_tail())
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{self._case.label}: {answer['error']}", self._stderr_tail())
        return answer

    def _stderr_tail(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-_STDERR_TAIL:]

    def close(self) -> None:
        """Ends the child: by the end of its input, or by a kill when that does not help."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# Arguments


def positive_int(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    return _at_least(1, int, text)


def non_negative_int(text: str) -> int:
    """An argparse type: an integer of at least 0."""
    return _at_least(0, int, text)


def positive_float(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = _at_least(0, float, text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number above 0. Received: {text}")
    return value


def _at_least(least: int, kind: Callable[[str], Any], text: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not value >= least:
        noun = "an integer" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"must be {noun} of at least {least}. Received: {text}")
    return value


def add_common_arguments(parser: argparse.ArgumentParser, *, timeout_seconds: float) -> None:
    """Adds what both benchmarks take."""
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="default: all")
    parser.add_argument("--bucket-bytes", type=positive_int, help="of ShardedStrategy, stages 0-2; default: its own")
    parser.add_argument("--prefetch", type=non_negative_int, help="of ShardedStrategy, stage 3; default: its own")
    parser.add_argument("--timeout-seconds", type=positive_float, default=timeout_seconds, help="longest wait for a child")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="append the JSON lines to FILE as well")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed or not measured")


def check_common_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program, with the reason, where arguments do not fit together."""
    if len(set(args.contenders)) < len(args.contenders):
        parser.error(f"argument --contenders: each at most once. Received: {' '.join(args.contenders)}")
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"argument --json: must be a file in a folder that exists. Received: {args.json}")


# Results


def command_line() -> str:
    """Returns the command that started this program, without the machine's own paths."""
    program, *rest = sys.orig_argv
    return " ".join([pathlib.PurePath(program).name, *rest])


def machine_fields() -> dict[str, Any]:
    """Returns the fields of a JSON line that say where it was measured."""
    return {
        "command": command_line(),
        "cpu_count": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def emit(record: dict[str, Any], file: pathlib.Path | None) -> None:
    """Prints `record` as one JSON line, and appends it to `file`."""
    line = json.dumps(record)
    print(line, flush=True)
    if file is not None:
        with file.open("a") as stream:
            stream.write(line + "\n")


def progress(text: str) -> None:
    """Tells the person who waits, on stderr: stdout has the results."""
    print(text, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a text table; first column to the left, None as "-"."""
    cells = [list(header), *[["-" if cell is None else str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def number(value: float | None, digits: int = 2) -> str | None:
    """Formats a figure of a table; None stays None."""
    return None if value is None else f"{value:.{digits}f}"


@dataclasses.dataclass(frozen=True)
class Target:
    """A figure that the project promises.

    Attributes:
        text: what is promised, in words, with the limit.
        value: what was measured; None: not measured in this run.
        is_met: whether `value` keeps the promise.
    """

    text: str
    value: float | None
    is_met: bool

    def __str__(self) -> str:
        if self.value is None:
            return f"target  {self.text}: not measured in this run"
        return f"target  {self.text}: {self.value:.2f}, {'met' if self.is_met else 'MISSED'}"


def exit_code(targets: Sequence[Target], *, failures: int, check: bool) -> int:
    """Returns 1 when a case failed or, with `check`, a target is missed or was not measured; 0 otherwise."""
    return int(bool(failures) or (check and not (targets and all(target.is_met for target in targets))))
