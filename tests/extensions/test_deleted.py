"""The core without its extensions: in a copy of the package in which their folders are deleted, the core's tests pass."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import tfdist

ROOT = pathlib.Path(tfdist.__file__).parents[1]
# Whose own tests stand in their folders alone. Many of pipelines and tensor ranks are among the core's.
ALONE = ["compression", "kernels", "ordering", "resuming", "shared_memory"]
EXTENSIONS = sorted(path.parent.name for path in (ROOT / "tfdist" / "extensions").glob("*/__init__.py"))
QUICK = ["losses/test_uneven_batches.py", "sharding/test_variable.py"]
ROOMS = "mesh runtime collectives placements sharding optimizers losses metrics data checkpoint keras_hooks strategy"
IS_THE_COPY = """
import pathlib
import sys

import tfdist


def test_it():
    assert pathlib.Path(tfdist.__file__).parent == pathlib.Path(__file__).parents[1] / "tfdist"
    assert not sys.modules.keys() & {missing}
"""


def test_without_any(tmp_path):
    run_without(EXTENSIONS, QUICK, tmp_path, seconds=200)


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ALONE)
def test_without(name, tmp_path):
    run_without([name], ROOMS.split(), tmp_path, seconds=2900)


def run_without(names, tests, folder, seconds):
    """Runs `tests`, files or folders of `tests/`, without the extensions of these `names`, nor files that import them."""
    for each in ("tfdist", "tests"):
        shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__"))
        for name in names:
            shutil.rmtree(folder / each / "extensions" / name)
    for each in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / each, folder)
    for path in (folder / "tests").rglob("test_*.py"):
        text = path.read_text("utf-8")
        if any(f"extensions.{name} import" in text or f"extensions.{name}." in text for name in names):
            path.unlink()
    missing = {f"tfdist.extensions.{name}" for name in names}
    (folder / "tests" / "test_is_the_copy.py").write_text(IS_THE_COPY.format(missing=missing))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *(f"tests/{each}" for each in ["test_is_the_copy.py", *tests]),
        ],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
