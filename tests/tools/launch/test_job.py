"""One attempt: what the workers are given, how they are watched, and how they end."""

import inspect
import json
import os
import signal
import textwrap
import time

import keras
import pytest

from tfdist.errors import PEER_FAILED_EXIT_CODE
from tfdist.tools.launch import job

pytestmark = pytest.mark.timeout(60)

ENVIRONMENT = """
names = "TF_CONFIG TFDIST_LAUNCHER TFDIST_ATTEMPT TFDIST_DEVICES_PER_WORKER CUDA_VISIBLE_DEVICES HOME OMP_NUM_THREADS"
note(f"environment_{rank}", json.dumps({name: os.environ.get(name) for name in names.split()}))
"""


def environments(tmp_path, n):
    return [json.loads((tmp_path / f"environment_{rank}").read_text()) for rank in range(n)]


# What the workers are given


def test_environment(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "stale")
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ended = run(ENVIRONMENT, "--workers", "3", "--devices-per-worker", "2")
    assert ended.code == 0
    found = environments(tmp_path, 3)
    configs = [json.loads(environment.pop("TF_CONFIG")) for environment in found]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": index} for index in range(3)]
    (cluster,) = {json.dumps(config["cluster"]) for config in configs}
    addresses = json.loads(cluster)["worker"]
    ports = [address.removeprefix("localhost:") for address in addresses]
    assert len(set(ports)) == 3
    assert ended.own[0].startswith(f"3 workers on localhost, ports {', '.join(ports)}, python {tmp_path}/train.py")
    expected = {"TFDIST_LAUNCHER": "1", "TFDIST_ATTEMPT": "0", "TFDIST_DEVICES_PER_WORKER": "2", "HOME": "/somewhere"}
    assert found == [expected | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": None}] * 3


def test_chief(run, tmp_path):
    ended = run(ENVIRONMENT + "print('here')", "--workers", "3", "--chief")
    assert sorted(ended.out) == ["[chief 0] here", "[worker 0] here", "[worker 1] here"]
    configs = [json.loads(environment["TF_CONFIG"]) for environment in environments(tmp_path, 3)]
    assert [config["task"] for config in configs] == [
        {"type": "chief", "index": 0},
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
    ]
    assert [(kind, len(addresses)) for kind, addresses in configs[0]["cluster"].items()] == [("chief", 1), ("worker", 2)]


def test_gpus(run, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert run(ENVIRONMENT, "--workers", "2").code == 0
    assert [found["CUDA_VISIBLE_DEVICES"] for found in environments(tmp_path, 2)] == ["4,5", "6,7"]
    assert run(ENVIRONMENT, "--workers", "2", "--cpu").code == 0
    assert [found["CUDA_VISIBLE_DEVICES"] for found in environments(tmp_path, 2)] == ["-1", "-1"]


def test_a_worker_has_a_group_of_its_own_and_no_input(start):
    launcher = start("print(repr(sys.stdin.read()), os.getpgid(0) == os.getpid())", "--workers", "2")
    out, _ = launcher.communicate("typed")
    assert sorted(out.splitlines()) == ["[worker 0] '' True", "[worker 1] '' True"]


# Their output


def test_lines_are_whole(run):
    source = """
        for number in range(200):
            os.write(1, b"abc")  # a line in two writes, so that lines of both could mix
            os.write(1, f"def {rank} {number}\\n".encode())
    """
    ended = run(source, "--workers", "2")
    for rank in range(2):
        lines = [line for line in ended.out if line.startswith(f"[worker {rank}]")]
        assert lines == [f"[worker {rank}] abcdef {rank} {number}" for number in range(200)]
    assert len(ended.out) == 400


def test_a_progress_bar_is_one_line(run):
    source = r"""
        for step in range(500):
            print("\b" * 6 * (step > 0) + "\r" + f"{step:3}/500", end="")
        print()
        print("partial", end="", file=sys.stderr)
    """
    ended = run(source, "--workers", "1")
    assert ended.out == ["[worker 0] 499/500"]
    assert "[worker 0] partial" in ended.err


def test_log_files(run, tmp_path):
    logs = tmp_path / "deep" / "logs"
    source = r"print('1%\r2%'); print(f'secret {rank}'); sys.stdout.flush(); os.write(2, b'raw \xff'); sys.exit(rank)"
    ended = run(source, "--workers", "2", "--log-dir", str(logs))
    assert sorted(path.name for path in (logs / "attempt_0").iterdir()) == ["worker_0.log", "worker_1.log"]
    for rank in range(2):
        # The order of the two streams is not defined.
        content = (logs / "attempt_0" / f"worker_{rank}.log").read_bytes()
        assert content.replace(b"raw \xff", b"") == b"1%%\r2%%\nsecret %d\n" % rank
        assert content.count(b"raw \xff") == 1
    assert ended.out == ["[worker 0] 2%", "[worker 0] secret 0"]
    assert f"output in {logs}/attempt_0, a file per worker; the console shows worker 0 only" in ended.own
    # The failed worker's last output is shown in any case.
    assert f"its last output (all of it in {logs}/attempt_0/worker_1.log):" in ended.own[-1]
    assert sorted(ended.err[-3:]) == ["2%", "raw \ufffd", "secret 1"]


def test_log_files_are_appended_to(run, tmp_path):
    for text in ("first", "second"):
        assert run(f"print({text!r})", "--workers", "1", "--log-dir", str(tmp_path)).code == 0
    assert (tmp_path / "attempt_0" / "worker_0.log").read_text() == "first\nsecond\n"


# How they end


def test_success(run):
    ended = run("wait_for_end(0) if rank else None", "--workers", "2")
    assert ended.code == 0
    assert ended.own[-1].startswith("attempt 1 of 1 ended after ") and ended.own[-1].endswith(" s: 2 workers succeeded")


def test_the_exit_code_is_that_of_the_failed_worker(run):
    ended = run("sys.exit(41) if rank == 1 else None", "--workers", "2")
    assert ended.code == 41
    assert ended.own[-2].endswith(": worker 1 failed with exit code 41")
    assert ended.own[-1].endswith("; it printed nothing")


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGKILL, "SIGKILL (out of memory?)"),
        (signal.SIGSEGV, "SIGSEGV"),
        (signal.SIGRTMIN + 3, f"signal {signal.SIGRTMIN + 3}"),
    ],
)
def test_a_signal_is_shown_as_shells_do(run, number, name):
    ended = run(f"os.kill(os.getpid(), {int(number)})", "--workers", "1")
    assert ended.code == 128 + number
    assert ended.own[-2].endswith(f": worker 0 was ended by {name}")


def test_the_traceback_comes_last(run, tmp_path):
    source = """
        if rank == 2:
            try:
                raise KeyError("earlier")
            except KeyError:
                import traceback; traceback.print_exc()
            raise RuntimeError("boom")
        wait_for_end(2)
        print(f"{rank} cleans up", file=sys.stderr)
    """
    ended = run(source, "--workers", "3")
    assert ended.code == 1
    headline = ended.err.index(f"tfdist: {ended.own[-1]}")
    pid = (tmp_path / "pid_2_0").read_text()
    assert ended.own[-1] == f"worker 2 (pid {pid}, attempt 1 of 1) failed with exit code 1; its last output:"
    assert ended.err[headline + 1] == "Traceback (most recent call last):"
    assert ended.err[-1] == "RuntimeError: boom"
    assert not any("earlier" in line for line in ended.err[headline:])
    assert {"[worker 0] 0 cleans up", "[worker 1] 1 cleans up"} <= set(ended.err[:headline])


def test_the_others_may_end_by_themselves(run):
    source = """
        if rank == 0:
            sys.exit(9)
        wait_for_end(0)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        print("by itself")
    """
    ended = run(source, "--workers", "2", "--grace-seconds", "30")
    assert (ended.code, ended.out) == (9, ["[worker 1] by itself"])
    assert ended.own[1] == "worker 0 failed with exit code 9; the others have 30 s to end by themselves"


def test_the_others_are_terminated_and_killed(run, pids, gone):
    source = """
        def on_sigterm(*_):
            print("told", flush=True)
            if rank == 1:
                os._exit(5)
        signal.signal(signal.SIGTERM, on_sigterm)
        note(f"ready_{rank}")
        if rank == 0:
            wait_for("ready_1"), wait_for("ready_2")
            sys.exit(9)
        while True:
            wait_for_signal()
    """
    start = time.monotonic()
    ended = run(source, "--workers", "3", "--grace-seconds", "0.1")
    assert ended.code == 9  # neither what worker 1 made of SIGTERM, nor the SIGKILL that worker 2 needed
    assert sorted(ended.out) == ["[worker 1] told", "[worker 2] told"]
    gone(pids(3))
    assert time.monotonic() - start >= 0.3


def test_nothing_of_the_group_is_left(run, tmp_path, gone):
    source = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])
        note("grandchild", child.pid)
        sys.exit(rank)
    """
    assert run(source, "--workers", "1").code == 0
    gone([int((tmp_path / "grandchild").read_text())])


# Which failure counts


def test_a_failed_peer_is_not_the_cause(run):
    source = f"""
        if rank == 0:
            sys.exit({PEER_FAILED_EXIT_CODE})
        wait_for_end(0)
        if rank == 1:
            raise ValueError("the cause")
        sys.exit({PEER_FAILED_EXIT_CODE})
    """
    ended = run(source, "--workers", "3")
    assert ended.code == 1
    assert ended.own[-1].startswith("worker 1 (") and ended.err[-1] == "ValueError: the cause"


def test_a_signal_beats_a_failed_peer(run):
    source = f"""
        if rank == 0:
            sys.exit({PEER_FAILED_EXIT_CODE})
        wait_for_end(0)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = run(source, "--workers", "2")
    assert ended.code == 128 + signal.SIGKILL
    assert ended.own[-1].startswith("worker 1 (")


def test_failed_peers_alone(run):
    ended = run(f"wait_for_end(0) if rank else None; sys.exit({PEER_FAILED_EXIT_CODE})", "--workers", "2")
    assert ended.code == PEER_FAILED_EXIT_CODE
    assert ended.own[-1].startswith("worker 0 (")


def test_what_the_launcher_ends_is_not_the_cause(run):
    source = f"""
        if rank == 0:
            wait_for("ready")
            sys.exit({PEER_FAILED_EXIT_CODE})
        note("ready")
        wait_for_signal()
    """
    ended = run(source, "--workers", "2", "--grace-seconds", "0.05")
    assert ended.code == PEER_FAILED_EXIT_CODE


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_first_failure_counts_even_if_it_was_not_seen(run, monkeypatch, tmp_path, first):
    source = f"""
        order = [({first} + i) % 3 for i in range(3)]
        print(rank)
        wait_for("looking_away")
        if rank != order[0]:
            wait_for_end(order[order.index(rank) - 1])
        sys.exit(10 + rank)
    """
    watch = job.Attempt._on_output

    def look_away(attempt, *args):
        monkeypatch.setattr(job.Attempt, "_on_output", watch)
        (tmp_path / "looking_away").touch()
        for worker in attempt._workers:
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        watch(attempt, *args)

    monkeypatch.setattr(job.Attempt, "_on_output", look_away)
    ended = run(source, "--workers", "3")
    assert (tmp_path / "looking_away").exists()
    assert ended.code == 10 + first


# Signals to the launcher. A worker sends them: it is the launcher's child.


def test_ctrl_c(run):
    source = """
        try:
            note(f"ready_{rank}")
            if rank == 1:
                wait_for("ready_0")
                os.kill(os.getppid(), signal.SIGINT)
            wait_for_signal()
        except KeyboardInterrupt:
            print("interrupted")
    """
    ended = run(source, "--workers", "2", "--max-restarts", "3")
    assert ended.code == 130
    assert sorted(ended.out) == ["[worker 0] interrupted", "[worker 1] interrupted"]
    assert len(ended.own) == 2 and ended.own[1].endswith(": stopped by SIGINT")


def test_a_second_ctrl_c_kills(run, pids, gone):
    source = """
        def on_sigint(*_):
            print("not now")
            if rank == 1:
                os.kill(os.getppid(), signal.SIGINT)
        signal.signal(signal.SIGINT, on_sigint)
        signal.signal(signal.SIGTERM, lambda *_: print("nor so"))
        note(f"ready_{rank}")
        if rank == 1:
            wait_for("ready_0")
            os.kill(os.getppid(), signal.SIGINT)
        while True:
            wait_for_signal()
    """
    ended = run(source, "--workers", "2", "--grace-seconds", "3600")
    assert ended.code == 130
    assert "[worker 1] not now" in ended.out and not any("nor so" in line for line in ended.out)
    gone(pids(2))


def test_a_failure_before_ctrl_c_is_still_reported(run):
    source = """
        if rank == 0:
            raise ValueError("reported")
        wait_for_end(0)
        os.kill(os.getppid(), signal.SIGINT)
        wait_for_signal()
    """
    ended = run(source, "--workers", "2")
    assert (ended.code, ended.err[-1]) == (130, "ValueError: reported")


def test_training_that_ended_at_nan_is_told(run):
    """Such a job has exit code 0, as a program on one device."""
    printed = inspect.getsource(keras.callbacks.TerminateOnNaN)
    assert 'f"Batch {batch}: Invalid loss, terminating training"' in printed
    ended = run("print('Batch 7: Invalid loss, terminating training')", "--workers", "2")
    assert ended.code == 0
    words = "2 workers succeeded, but training was stopped at a loss of NaN or infinity: 'Batch 7: Invalid loss"
    assert words in ended.own[-1]


# What the workers leave for a restart


LEAVE = """
descriptor = int(os.environ["TFDIST_LEFTOVERS"].partition(":")[0])
leave = lambda path: os.write(descriptor, json.dumps(str(path)).encode() + b"\\n")
"""


def test_files_for_a_restart_are_removed_when_none_can_come(run, tmp_path):
    source = """
        folder = here / "backup"
        folder.mkdir(exist_ok=True)
        (folder / f"finished-{rank}").write_text("")
        leave(folder / f"finished-{rank}")
        note(f"left_{rank}_{attempt}")
        wait_for(f"left_{1 - rank}_{attempt}")
        if attempt == 0 and rank == 1:
            sys.exit(1)
        leave(here / "no" / "such" / "file")
        os.write(descriptor, b"torn")
    """
    assert run(LEAVE + textwrap.dedent(source), "--workers", "2").code == 1
    assert len(list((tmp_path / "backup").iterdir())) == 2
    assert run(LEAVE + textwrap.dedent(source), "--workers", "2", "--max-restarts", "1").code == 0
    assert not (tmp_path / "backup").exists()


def test_more_than_the_pipe_holds_is_not_waited_for(run):
    source = """
        try:
            while True:
                leave(1000 * "x")
        except BlockingIOError:
            print("full")
    """
    ended = run(LEAVE + textwrap.dedent(source), "--workers", "1")
    assert (ended.code, ended.out) == (0, ["[worker 0] full"])
