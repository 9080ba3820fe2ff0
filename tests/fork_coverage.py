"""Coverage of the forks of `tests.forks`, where `make test` measures that of the tests.

slipcover measures the processes of pytest, which tell each other by these variables that it is on and where results go. The forks
take part as if they were some more of them.
"""

from __future__ import annotations

import json
import os
import pathlib

_FOLDER = os.environ.get("SLIPCOVER_COVERAGE_DIR")


def measure_what_is_imported() -> None:
    """Makes this process, and its forks, note which lines of tfdist run; to be called before tfdist is imported."""
    if _FOLDER:
        import slipcover.pytest_plugin  # noqa: F401


def write() -> None:
    """Writes what this fork has noted where slipcover looks for it."""
    if _FOLDER:
        from slipcover import pytest_plugin

        os.chdir(pathlib.Path(__file__).parents[1])  # slipcover looks for sources in the folder where it was started
        text = json.dumps(pytest_plugin._slipcover_instance.get_coverage())
        pathlib.Path(_FOLDER, f"coverage-gw-fork-{os.getpid()}.json").write_text(text, encoding="utf-8")
