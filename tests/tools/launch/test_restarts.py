"""Attempts after the first."""

import os
import signal

import pytest

from tfdist.tools.launch import job

pytestmark = pytest.mark.timeout(60)


def test_until_it_succeeds(run, tmp_path):
    source = """
        note(f"ports_{attempt}", json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
        print("attempt", attempt)
        if attempt < 2:
            raise ValueError(f"in attempt {attempt}")
    """
    ended = run(source, "--workers", "1", "--max-restarts", "5")
    assert ended.code == 0
    assert ended.out == [f"[worker 0] attempt {attempt}" for attempt in range(3)]
    assert [line for line in ended.own if line.startswith("restarting")] == [
        "restarting, attempt 2 of 6, from the last backup the script made",
        "restarting, attempt 3 of 6, from the last backup the script made",
    ]
    assert {"ValueError: in attempt 0", "ValueError: in attempt 1"} <= set(ended.err)
    assert len({(tmp_path / f"ports_{attempt}").read_text() for attempt in range(3)}) == 3


def test_all_are_started_again(run, tmp_path):
    source = """
        if attempt == 0 and rank == 1:
            sys.exit(1)
        wait_for(f"pid_{1 - rank}_{attempt}")
    """
    ended = run(source, "--workers", "2", "--max-restarts", "1", "--log-dir", str(tmp_path / "logs"))
    assert ended.code == 0
    assert len({(tmp_path / f"pid_{rank}_{attempt}").read_text() for rank in range(2) for attempt in range(2)}) == 4
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["attempt_0", "attempt_1"]


def test_as_often_as_was_said(run, tmp_path):
    ended = run("sys.exit(7)", "--workers", "1", "--max-restarts", "2")
    assert ended.code == 7
    assert sorted(path.name for path in tmp_path.glob("pid_0_*")) == ["pid_0_0", "pid_0_1", "pid_0_2"]
    assert "attempt 3 of 3) failed with exit code 7" in ended.own[-1]


def test_not_without_being_asked(run, tmp_path):
    assert run("sys.exit(7)", "--workers", "1").code == 7
    assert len(list(tmp_path.glob("pid_0_*"))) == 1


def test_not_after_wrong_arguments(run, tmp_path):
    source = """
        import argparse
        argparse.ArgumentParser().parse_args()
    """
    ended = run(source, "--workers", "1", "--max-restarts", "2", args=["--epoch", "1"])
    assert ended.code == 2
    assert len(list(tmp_path.glob("pid_0_*"))) == 1
    assert ended.own[-2] == "not restarting: exit code 2 says that the script's arguments are wrong"
    assert ended.err[-1].endswith("error: unrecognized arguments: --epoch 1")


def test_not_after_ctrl_c_between_attempts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "DELAY_SECONDS", 600.0)
    say = job.say

    def interrupt(text):
        say(text)
        if text.startswith("restarting"):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(job, "say", interrupt)
    ended = run("sys.exit(7)", "--workers", "1", "--max-restarts", "2")
    assert ended.code == 130
    assert ended.own[-1] == "stopped by SIGINT"
    assert len(list(tmp_path.glob("pid_0_*"))) == 1


def test_signals_are_as_before(run):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert run("pass", "--workers", "1").code == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_job_has_a_name_in_all_attempts(run, tmp_path, monkeypatch):
    source = """
        note(f"job_{attempt}", os.environ.get("TFDIST_JOB", ""))
        sys.exit(attempt == 0)
    """
    names = []
    for _ in range(2):
        assert run(source, "--workers", "1", "--max-restarts", "1").code == 0
        names += [(tmp_path / f"job_{attempt}").read_text() for attempt in range(2)]
    assert names[0] == names[1] != names[2] == names[3]
    assert all(names)
    monkeypatch.setenv("TFDIST_JOB", "mine")
    assert run(source, "--workers", "1", "--max-restarts", "1").code == 0
    assert (tmp_path / "job_1").read_text() == "mine"
    monkeypatch.delenv("TFDIST_JOB")
    assert run(source, "--workers", "1").code == 1
    assert (tmp_path / "job_0").read_text() == "", "no restart can come"
