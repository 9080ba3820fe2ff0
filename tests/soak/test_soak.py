"""A short round of `make soak`, and what it compares by."""

import json

import numpy as np
import pytest
from grids import exhaustive

from tests.soak import __main__ as driver
from tests.soak import judging
from tests.soak.jobs import Job
from tests.soak.table import FAULTS

NAMED = {fault.name: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """The undisturbed runs, each made once."""
    return driver.References(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "job"),
    [
        ("kill_in_step", Job(launch="fork")),
        exhaustive("raise_in_data", Job(launch="fork", data="generator", max_restarts=0)),
        ("no_task", Job(launch="fork", max_restarts=0, rendezvous_timeout_seconds=3)),
    ],
)
def test_a_short_round(fault, job, tmp_path, references):
    row = driver.one(NAMED[fault], job, 0, tmp_path / "run", references)
    assert row.holds, row


def write(folder, values, logs, attempt=0):
    folder.mkdir(exist_ok=True)
    np.savez(folder / "result.npz", *[np.float32(value) for value in values])
    (folder / f"losses_{attempt}_0.jsonl").write_text("".join(f"{json.dumps(log)}\n" for log in logs))


def test_every_bit_is_compared(tmp_path):
    logs = [["step 0 0", 0.5], ["step 0 1", {"loss": 0.25}]]
    write(tmp_path / "reference", [1.0, 2.0], logs)
    write(tmp_path / "run", [1.0, 2.0], logs)
    assert judging.differences(tmp_path / "run", tmp_path / "reference") == []
    write(tmp_path / "run", [1.0, np.nextafter(np.float32(2), np.float32(3))], logs)
    assert judging.differences(tmp_path / "run", tmp_path / "reference") == ["1 of 2 variables differ, by up to 2.4e-07"]


def test_logs_are_compared_over_all_attempts(tmp_path):
    logs = [["step 0 0", 0.5], ["step 0 1", 0.25]]
    write(tmp_path / "reference", [1.0], logs)
    write(tmp_path / "run", [1.0], logs[:1])
    (missing,) = judging.differences(tmp_path / "run", tmp_path / "reference")
    assert "1 steps or epochs were never logged" in missing
    write(tmp_path / "run", [1.0], logs[1:], attempt=1)
    assert judging.differences(tmp_path / "run", tmp_path / "reference") == []
    write(tmp_path / "run", [1.0], [["step 0 1", 0.26]], attempt=1)
    assert "step 0 1 0.26, not 0.25" in judging.differences(tmp_path / "run", tmp_path / "reference")[0]


def test_names_of_jobs():
    for fault in FAULTS:
        assert all(Job.from_name(job.name) == job for job in fault.jobs)
        assert len({job.name for job in fault.jobs}) == len(fault.jobs)
    assert len(NAMED) == len(FAULTS)


def test_a_seed_gives_the_same_row():
    phases = {worker: [("started", 1.0), ("epoch 0", 2.0), ("epoch 1", 3.0)] for worker in range(2)}
    plans = [driver.plan(NAMED["kill"], Job(), seed, phases) for seed in (3, 3, 4)]
    assert plans[0] == plans[1] != plans[2]
