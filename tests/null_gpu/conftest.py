"""The fixture `null_gpus`."""

from __future__ import annotations

import functools

import pytest

from tests.null_gpu import building, running


@pytest.fixture
def null_gpus(tmp_path):
    """Runs a program on null GPUs: `null_gpus(Machine(...), [arguments of Python], workers_number)`; see `running.run`."""
    reason = building.missing()
    if reason:
        pytest.skip(reason)
    return functools.partial(running.run, tmp_path)
