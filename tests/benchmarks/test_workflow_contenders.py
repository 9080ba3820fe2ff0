"""A contender of `benchmarks/keras_workflow.py` that dies is named. They run a line instead of a training."""

import subprocess
import sys

import pytest

from benchmarks.keras_workflow import take_turn

WAITS = "import sys; sys.stdin.readline(); "


def turn(program):
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        return take_turn("stage 3", process)


def test_medians_are_read():
    assert turn(WAITS + "print('[{}, {}]')") == [{}, {}]


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        (WAITS + "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV"),
        (WAITS + "sys.exit(3)", "exit code 3"),
        ("import os; os.close(0)", "exit code 0"),
    ],
)
def test_who_died_is_named(program, cause):
    with pytest.raises(SystemExit, match=f"contender `stage 3` ended with {cause}:"):
        turn(program)


def test_one_that_is_gone_before_its_turn():
    with subprocess.Popen([sys.executable, "-c", "pass"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.wait()
        with pytest.raises(SystemExit, match="exit code 0"):
            take_turn("stage 0", process)
