"""The examples' data set, prepared once for all tests since that takes longer than training on it, and runs without it."""

import fcntl
import importlib
import os
import runpy

import pytest

from tests import forks
from tests.workers import ROOT

PREPARE = """
import sys

sys.path.insert(0, {examples!r})  # a fork's path is that of its parent

import stdlib_text
import tensorflow_datasets as tfds

tfds.disable_progress_bar()
tfds.builder("stdlib_text", data_dir={data!r}).download_and_prepare()
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
            program = folder / "prepare.py"
            program.write_text(PREPARE.format(examples=str(ROOT / "examples"), data=str(data)), "utf-8")
            _run_in_fork(program, folder, dict(os.environ), seconds=240)
    return data


def _run_in_fork(program, folder, environment, seconds):
    """Runs a program; returns its output."""
    files = {"output": folder / "output.txt", "errors": folder / "errors.txt"}
    process = forks.start(runpy.run_path, str(program), None, "__main__", environment=environment, folder=folder, **files)
    try:
        code = process.wait(seconds)
    finally:
        process.kill()
    output = files["output"].read_text("utf-8")
    assert code == 0, output + files["errors"].read_text("utf-8")
    return output


IN_A_FORK = """
import sys

sys.path.insert(0, {examples!r})  # a fork's path is that of its parent

import numpy as np

import train_gpt
import {name}

if {on_random_text}:
    text = np.random.default_rng(0).choice(np.frombuffer(b"tensor ", np.uint8), 2000)
    train_gpt.load_tokens = lambda dataset, data_dir: (text[:1500], text[1500:])
{name}.main({argv!r})
"""


@pytest.fixture
def run_example(tmp_path):
    """Runs an example with flags in a process of its own: it splits the CPU its own way. Returns its output."""

    def run(name, *flags, on_random_text=False):
        program = tmp_path / f"{name}_program.py"
        argv = [*flags, "--out", str(tmp_path)]
        filled = {"name": name, "on_random_text": on_random_text, "examples": str(ROOT / "examples"), "argv": argv}
        program.write_text(IN_A_FORK.format(**filled), "utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "COLUMNS": "200",
        }
        return _run_in_fork(program, tmp_path, environment, seconds=120)

    return run


@pytest.fixture
def run_on_random_text(run_example):
    """The same on random text."""
    return lambda name, flags: run_example(name, *flags.split(), on_random_text=True)


@pytest.fixture
def records(monkeypatch):
    """Returns a function of the folder of a prepared data set: each split's [source, text]s."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    importlib.import_module("stdlib_text")
    datasets = importlib.import_module("tensorflow_datasets")

    def read(folder):
        builder = datasets.builder("stdlib_text", data_dir=folder)
        return {
            split: [
                [record["source"].decode(), record["text"].decode()]
                for record in builder.as_dataset(split=split).as_numpy_iterator()
            ]
            for split in builder.info.splits
        }

    return read


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
