"""What tells a restart from a run on purpose."""

import dataclasses
import os

import pytest

from tfdist.runtime import JobRun, remove_after_success, this_run
from tfdist.runtime.leftovers import environment_of, parse_leftovers


@pytest.fixture
def environment(monkeypatch):
    for name in ("TFDIST_JOB", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TFDIST_LEFTOVERS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def elsewhere(run):
    """The same run as another process of it would see it, after it was written down."""
    return dataclasses.asdict(dataclasses.replace(run, process="another"))


def test_nothing_is_known_of_a_plain_process(environment):
    assert this_run().job == ""
    assert not this_run().restarts(elsewhere(this_run()))


def test_a_name_tells_restarts_from_new_jobs(environment):
    environment.setenv("TFDIST_JOB", "a")
    run = this_run()
    assert run.restarts(elsewhere(run))
    assert not run.restarts(dataclasses.asdict(run)), "a `fit` of this process"
    assert not run.restarts(elsewhere(JobRun("b", None, "")))
    environment.setenv("SLURM_JOB_ID", "7")
    assert this_run() == run


def test_slurm_must_have_requeued_the_job(environment):
    environment.setenv("SLURM_JOB_ID", "7")
    first = elsewhere(this_run())
    assert not this_run().restarts(first), "two `srun` of one allocation"
    environment.setenv("SLURM_RESTART_COUNT", "1")
    assert this_run().restarts(first)
    assert not this_run().restarts(elsewhere(this_run()))


def test_leftovers_are_told_through_the_pipe_and_nowhere_else(environment):
    end, descriptor = os.pipe()
    remove_after_success("/nobody/hears/it")
    for name, value in environment_of(descriptor).items():
        environment.setenv(name, value)
    remove_after_success("/a/ä\nb")
    os.close(descriptor)
    remove_after_success("/closed")
    other = os.open(os.devnull, os.O_RDWR)  # takes the number
    remove_after_success("/another/file")
    os.close(other)
    assert parse_leftovers(os.read(end, 1000) + b'"torn') == ["/a/ä\nb"]
    assert os.read(end, 1000) == b""
    os.close(end)
