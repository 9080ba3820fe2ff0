"""Workers that wait for each other to start are told at once when one of them has ended; who was stopped is woken for its end."""

import time

import pytest

pytestmark = pytest.mark.timeout(60)


def test_a_worker_that_waits_is_told_when_another_fails_before_it_comes(run):
    source = f"""
        sys.path.insert(0, {str(__file__).rpartition("/tests/")[0]!r})
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
    ended = run(source, "--workers", "2", "--grace-seconds", "50")
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
