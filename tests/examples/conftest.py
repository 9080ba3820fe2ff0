"""The examples' data set, of a small library, prepared once for all tests; and runs without it."""

import fcntl
import importlib
import os

import pytest

from tests import forks
from tests.examples import program


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
            _run_in_fork(folder, dict(os.environ), 240, program.prepare, str(data))
    return data


def _run_in_fork(folder, environment, seconds, function, *arguments):
    """Calls a function; returns what it prints."""
    files = {"output": folder / "output.txt", "errors": folder / "errors.txt"}
    process = forks.start(function, *arguments, environment=environment, folder=folder, **files)
    try:
        code = process.wait(seconds)
    finally:
        process.kill()
    output = files["output"].read_text("utf-8")
    assert code == 0, output + files["errors"].read_text("utf-8")
    return output


@pytest.fixture
def run_example(tmp_path):
    """Runs an example with flags in a process of its own: it splits the CPU its own way. Returns its output."""

    def run(name, *flags, on_random_text=False):
        argv = [*flags, "--out", str(tmp_path)]
        return _run_in_fork(tmp_path, {**os.environ, "COLUMNS": "200"}, 120, program.run, name, argv, on_random_text)

    return run


@pytest.fixture
def run_on_random_text(run_example):
    """The same on random text."""
    return lambda name, flags: run_example(name, *flags.split(), on_random_text=True)


@pytest.fixture
def stdlib_text(monkeypatch):
    """The example's module of the data set."""
    monkeypatch.syspath_prepend(program.EXAMPLES)
    return importlib.import_module("stdlib_text")


@pytest.fixture
def records(stdlib_text):
    """Returns a function of the folder of a prepared data set: each split's [source, text]s."""
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

    monkeypatch.syspath_prepend(program.EXAMPLES)
    return refuse
