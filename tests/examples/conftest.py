"""The example's data set, prepared once for all tests: preparing it takes longer than training on it."""

import fcntl
import os
import subprocess
import sys

import pytest

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
