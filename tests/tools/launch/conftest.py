"""Runs the launcher on small scripts without TensorFlow, in this process or in one of its own."""

import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests import forks
from tests.tools.launch import light
from tfdist.tools.launch import job, output
from tfdist.tools.launch.cli import main

# Beside every script, for it to import.
CHILD = '''
import json, os, pathlib, select, signal, sys, time

task = json.loads(os.environ["TF_CONFIG"])["task"]
rank = task["index"] + (task["type"] == "worker" and "chief" in json.loads(os.environ["TF_CONFIG"])["cluster"])
attempt = int(os.environ["TFDIST_ATTEMPT"])
here = pathlib.Path(__file__).parent

def note(name, text=""):
    """Makes a file that others may await."""
    (here / f".{name}").write_text(str(text))
    (here / f".{name}").rename(here / name)

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.002)
    return (here / name).read_text()

def wait_for_end(rank):
    select.select([os.pidfd_open(int(wait_for(f"pid_{rank}_{attempt}")))], [], [])

def wait_for_signal():
    """Longer than a test may take: whoever waits here is ended by the launcher."""
    time.sleep(600)

note(f"pid_{rank}_{attempt}", os.getpid())
'''

LAUNCHERS = {"light": ["-c", light.LAUNCHER], "real": ["-m", "tfdist"]}


@dataclasses.dataclass(frozen=True)
class Ended:
    code: int
    out: list[str]
    err: list[str]

    @property
    def own(self):
        """The launcher's lines."""
        return [line.removeprefix("tfdist: ") for line in self.err if line.startswith("tfdist: ")]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No GPUs, whatever this machine has, and no waiting."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(job, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(job, "KILL_SECONDS", 0.2)


@pytest.fixture
def script(tmp_path):
    """Writes a script; returns its path."""
    (tmp_path / "child.py").write_text(CHILD)

    def write(source, name="train.py"):
        path = tmp_path / name
        path.write_text("from child import *\n" + textwrap.dedent(source))
        return path

    return write


@pytest.fixture
def run(script, capsys, monkeypatch):
    """Runs a script under the launcher, in this process."""
    monkeypatch.setattr(output, "UPDATE_SECONDS", math.inf)  # what is printed must not depend on how busy the machine is

    def launch(source, *options, args=()):
        code = main(["run", *options, str(script(source)), *args])
        captured = capsys.readouterr()
        return Ended(code, captured.out.splitlines(), captured.err.splitlines())

    return launch


@pytest.fixture
def start(script):
    """Starts a launcher as a process of its own, which is ended with the test."""
    with contextlib.ExitStack() as stack:

        def launch(source, *options, launcher="light"):
            process = subprocess.Popen(
                [sys.executable, *LAUNCHERS[launcher], "run", *options, str(script(source))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield launch


@pytest.fixture
def start_in_fork(script, tmp_path):
    """The same for a launcher in which TensorFlow is imported; `out.txt` and `err.txt` get its output."""
    with contextlib.ExitStack() as stack:

        def launch(source, *options, function=main):
            files = {"output": tmp_path / "out.txt", "errors": tmp_path / "err.txt"}
            argv = ["run", *options, str(script(source))]
            process = forks.start(function, argv, environment=dict(os.environ), folder=tmp_path, **files)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield launch


def wait_for(condition, seconds=30.0):
    """Returns what `condition` returns once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
    return value


def is_running(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.fixture
def pids(tmp_path):
    """Returns the process ids of `n` workers once all have noted them under a name; ends, with the test, those that are left."""
    found = []

    def wait(n, name="pid"):
        paths = [tmp_path / f"{name}_{rank}_0" for rank in range(n)]
        wait_for(lambda: all(path.exists() for path in paths))
        found.extend(int(path.read_text()) for path in paths)
        return found[-n:]

    yield wait
    for pid in found:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def gone():
    """Waits until no process of these ids runs."""
    return lambda pids: wait_for(lambda: not any(map(is_running, pids)))
