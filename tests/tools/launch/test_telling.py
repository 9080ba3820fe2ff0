"""Workers that wait for each other to start are told at once when one of them has ended; who was stopped is woken."""

import textwrap
import time

import pytest

from tests.tools.launch import light
from tfdist.tools.launch import job, worker

pytestmark = pytest.mark.timeout(60)


def test_a_worker_that_waits_is_told_when_another_fails_before_it_comes(run):
    source = """
        if rank == 1:
            wait_for("listening")
            raise ValueError("the cause")
        from tfdist.runtime.cluster import Cluster, Task
        from tfdist.runtime.rendezvous import WorkerFailedError, wait_for_workers
        addresses = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
        note("listening")
        time.sleep(1)  # not yet: it is tried again
        try:
            wait_for_workers(Cluster(tuple(Task("worker", i, a) for i, a in enumerate(addresses)), 0), 50)
        except WorkerFailedError as error:
            print(error.failure.worker_index, error.failure.what)
            sys.exit(78)
    """
    started = time.monotonic()
    ended = run(light.PACKAGES + textwrap.dedent(source), "--workers", "2", "--grace-seconds", "50")
    assert time.monotonic() - started < 40
    assert ended.code == 1
    assert ended.out == ["[worker 0] 1 failed with exit code 1"]


def test_a_stopped_worker_may_end_by_itself(run):
    source = """
        if rank == 1:
            note("ready")
            os.kill(os.getpid(), signal.SIGSTOP)
            print("awake")
            sys.exit(1)
        wait_for("ready")
        pid = int(wait_for(f"pid_1_{attempt}"))
        while pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        sys.exit(78)
    """
    ended = run(source, "--workers", "2", "--grace-seconds", "50")
    assert ended.code == 1 and ended.out == ["[worker 1] awake"]
    assert ended.own[-1].startswith("worker 1 (")


def test_a_worker_that_was_stopped_alone_is_woken(run, monkeypatch):
    """Also where all others have ended: it stayed for ever."""
    monkeypatch.setattr(worker, "WAKE_LOOKS", 2)
    monkeypatch.setattr(job, "LOOK_SECONDS", 0.2)
    source = """
        if rank == 1:
            wait_for_end(0)
            os.kill(os.getpid(), signal.SIGSTOP)
            print("awake")
    """
    ended = run(source, "--workers", "2")
    assert ended.code == 0 and ended.out == ["[worker 1] awake"]
    assert "worker 1 was stopped alone for " in ended.own[1]


class _Process:
    """A worker, as `Stops` sees it."""

    def __init__(self, exit_code=None, is_stopped=False):
        self.exit_code = exit_code
        self.is_stopped = is_stopped


def test_who_is_woken(monkeypatch):
    monkeypatch.setattr(worker, "WAKE_LOOKS", 3)

    def woken(*workers):
        seen = worker.Stops()
        return [seen.overdue(workers) for _ in range(4)]

    runs, stopped, ended = _Process(), _Process(is_stopped=True), _Process(exit_code=0)
    assert woken(runs, stopped, ended) == [[], [], [stopped], []]
    assert woken(ended, stopped) == [[], [], [stopped], []]
    assert woken(stopped, _Process(is_stopped=True)) == [[]] * 4, "the job is paused"
    assert woken(runs, ended) == [[]] * 4
