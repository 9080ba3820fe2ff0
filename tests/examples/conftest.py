"""The examples' data set, prepared once for all tests since that takes longer than training on it, and runs without it."""

import fcntl
import importlib
import os
import runpy
import subprocess
import sys

import pytest

from tests import forks
from tests.workers import ROOT

PREPARE = """
import sys, stdlib_text
import tensorflow_datasets as tfds

tfds.disable_progress_bar()
tfds.builder("stdlib_text", data_dir=sys.argv[1]).download_and_prepare()
"""


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """The folder of the prepared data set: a test links to it as the `data` of its own output folder."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all processes of the test run
    data = folder / "stdlib_text"
    with open(folder / "stdlib_text.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if not data.exists():
            path = os.pathsep.join([str(ROOT / "examples"), str(ROOT)])
            environment = {**os.environ, "PYTHONPATH": path}
            subprocess.run([sys.executable, "-c", PREPARE, str(data)], env=environment, check=True, timeout=240)
    return data


ON_RANDOM_TEXT = """
import sys

sys.path.insert(0, {examples!r})  # a fork's path is that of its parent

import numpy as np

import train_gpt
import {name}

text = np.random.default_rng(0).choice(np.frombuffer(b"tensor ", np.uint8), 2000)
train_gpt.load_tokens = lambda dataset, data_dir: (text[:1500], text[1500:])
{name}.main({argv!r})
"""


@pytest.fixture
def run_on_random_text(tmp_path):
    """Runs an example with flags, on random text, in a process of its own: it splits the CPU its own way. Returns its output."""

    def run(name, flags):
        argv = [*flags.split(), "--out", str(tmp_path)]
        program = tmp_path / "program.py"
        program.write_text(ON_RANDOM_TEXT.format(name=name, examples=str(ROOT / "examples"), argv=argv), "utf-8")
        files = {"output": tmp_path / "output.txt", "errors": tmp_path / "errors.txt"}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        process = forks.start(runpy.run_path, str(program), None, "__main__", environment=environment, folder=tmp_path, **files)
        try:
            code = process.wait(120)
        finally:
            process.kill()
        output = files["output"].read_text("utf-8")
        assert code == 0, output + files["errors"].read_text("utf-8")
        return output

    return run


@pytest.fixture
def refused_flags(monkeypatch, capsys):
    """Gives flags to an example that must refuse them; returns what it says."""

    def refuse(name, flags):
        with pytest.raises(SystemExit) as stop:
            importlib.import_module(name).parse_args(flags.split())
        assert stop.value.code == 2
        return capsys.readouterr().err

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return refuse
