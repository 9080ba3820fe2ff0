"""Whatever a worker's main thread does, it learns what became of the others: dead, stopped, cut off, or hanging."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from grids import exhaustive

from tests import workers
from tests.soak import hosts

CASES = "tests.strategy.failure_cases"
PEER_FAILED = 78
SECONDS_TO_END = 30

pytestmark = pytest.mark.timeout(200)


def end(job, victim, number=None):
    """Waits until worker `victim` acts and, after a signal to all, until all have ended; returns the exit codes."""
    job.workers[victim].wait_for("acting", 120)
    started = time.monotonic()
    for worker in job.workers if number else ():
        os.kill(worker.process.pid, number)
    codes = job.wait(60)
    assert time.monotonic() - started < SECONDS_TO_END
    return codes


def said(worker):
    """Returns what `worker` has said of the failure, in one piece."""
    lines = [line for line in worker.output.splitlines() if line.startswith("tfdist: ")]
    assert len(set(lines)) == 1, worker.output[-3000:]
    return lines[0]


@pytest.mark.parametrize("others_act", ["hang", exhaustive("")])
def test_a_death_is_noticed_outside_of_collectives(tmp_path, others_act):
    """The others wait in a callback, or train."""
    each = [{"act": others_act, "grace_seconds": 2}, {"act": "die"}]
    with workers.job(tmp_path, 2, f"{CASES}:fit_and", each=each) as job:
        assert end(job, 1) == [PEER_FAILED, -signal.SIGKILL]
        assert "tfdist: Worker 1, worker 1 (localhost:" in said(job.workers[0])
        assert "died: its process is gone" in said(job.workers[0])


@pytest.mark.parametrize("victim", [0, exhaustive(1)])
def test_a_stopped_worker_is_told_and_ends_when_it_wakes(tmp_path, victim):
    each = [{"act": "stop" if index == victim else "", "peer_timeout_seconds": 3} for index in range(2)]
    with workers.job(tmp_path, 2, f"{CASES}:fit_and", each=each) as job:
        stopped, other = job.workers[victim], job.workers[1 - victim]
        stopped.wait_for("acting", 120)
        started = time.monotonic()
        while other.returncode is None:
            assert time.monotonic() - started < SECONDS_TO_END
            time.sleep(0.05)
        os.kill(stopped.process.pid, signal.SIGCONT)
        codes = job.wait(60)
        assert (codes[victim], codes[1 - victim]) == (1, PEER_FAILED)
        assert f"tfdist: Worker {victim}, worker {victim} (localhost:" in said(other)
        assert f"tfdist: This worker, worker {victim} (localhost:" in said(stopped)
        for worker in job.workers:
            assert "has not been heard of for" in said(worker) and "(`peer_timeout_seconds`)" in said(worker)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("act", "peer_timeout_seconds"), [("stop for a while", 20), ("hold the interpreter", 3)])
def test_silence_that_costs_nothing(tmp_path, act, peer_timeout_seconds):
    """A short stop; and a call that keeps Python's lock, and so the watching thread from speaking, longer than the time-out."""
    acts, timeouts = ["", act], {"epochs": 3, "peer_timeout_seconds": peer_timeout_seconds}
    each = [{"act": one, **timeouts} for one in acts]
    with workers.job(tmp_path, 2, f"{CASES}:fit_and", each=each) as job:
        job.results(100)


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1])
def test_a_step_ends_in_time_whoever_is_silent(tmp_path, victim):
    """A worker that stops for ever, the chief too, when a step has less time than a peer."""
    each = [{"act": "stop" if index == victim else "", "step_timeout_seconds": 9} for index in range(2)]
    with workers.job(tmp_path, 2, f"{CASES}:fit_and", each=each) as job:
        job.workers[victim].wait_for("acting", 120)
        started, other = time.monotonic(), job.workers[1 - victim]
        while other.returncode is None:
            assert time.monotonic() - started < SECONDS_TO_END
            time.sleep(0.05)
        assert other.returncode == PEER_FAILED
        assert f"tfdist: Worker {victim}, worker {victim} (localhost:" in said(other)
        assert "has not been heard of for" in said(other) and "(`step_timeout_seconds`)" in said(other)


def test_a_watch_that_breaks_ends_the_job(tmp_path):
    each = [{"act": "", "grace_seconds": 2}, {"act": "break the watch", "grace_seconds": 2}]
    with workers.job(tmp_path, 2, f"{CASES}:fit_and", each=each) as job:
        assert end(job, 1) == [PEER_FAILED, 1]
        for worker in job.workers:
            assert "cannot watch the others: IndexError: list index out of range" in said(worker)


@pytest.mark.parametrize("way", ["generator", exhaustive("from_generator"), exhaustive("sequence")])
def test_python_code_that_draws_other_data(tmp_path, way):
    """Each worker kept its rows of a batch of its own, and nobody noticed."""
    each = [{"seed": index, "batches": 200, "way": way} for index in range(3)]
    with workers.job(tmp_path, 3, f"{CASES}:fit_generator", each=each) as job:
        job.wait(120)
        for worker in job.workers:
            words = said(worker)
            assert "Workers read different data: batch 0 of a dataset that runs Python code" in words, worker.output[-3000:]
            assert "seed what the code draws" in words


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["generator", "from_generator", "sequence"])
def test_python_code_that_draws_the_same_data(tmp_path, way):
    with workers.job(tmp_path, 3, f"{CASES}:fit_generator", each=[{"seed": 0, "batches": 9, "way": way}] * 3) as job:
        job.results(120)


@pytest.mark.parametrize(
    ("act", "is_known", "words"),
    [
        ("save", False, " waits at a point where all workers must meet, save/begin: "),
        exhaustive("save", True, " waits at a point where all workers must meet, save/begin: "),
        ("checkpoint", True, " waits at a point where all workers must meet, ModelCheckpoint yes: "),
        exhaustive("read", True, " in a program of 1 all_gather that begins with all_gather 'assemble"),
        exhaustive("read", False, " in a program of 1 all_gather that begins with all_gather 'assemble"),
    ],
)
def test_what_one_worker_does_alone(tmp_path, act, is_known, words):
    """The others wait in the next step, or in a message between two, such as that of a metric which a new epoch sets to zero:
    all waited for `step_timeout_seconds`, 600 s."""
    each = [{"folder": str(tmp_path), "act": act if index == 1 else "", "is_known": is_known} for index in range(3)]
    with workers.job(tmp_path, 3, f"{CASES}:fit_and_alone", each=each) as job:
        codes = end(job, 1)
        assert codes == [PEER_FAILED] * 3
        for worker in job.workers:
            assert "What one worker does, all must do: give every worker the same callbacks" in worker.output
            assert words in worker.output and "worker 1 (localhost:" in worker.output


@pytest.mark.parametrize(
    ("act", "code", "words"),
    [
        ("die", -signal.SIGKILL, "died: its process is gone"),
        exhaustive("raise", 1, "raised ValueError: the data of this worker are spoilt"),
        exhaustive("stop", None, "has not been heard of for"),
    ],
)
def test_while_servers_connect(tmp_path, act, code, words):
    """Python's own call would hold the interpreter's lock, and nothing would be noticed."""
    each = [{"act": act if index == 1 else ""} for index in range(3)]
    with workers.job(tmp_path, 3, f"{CASES}:connect_and", each=each) as job:
        job.workers[1].wait_for("acting", 120)
        started = time.monotonic()
        others = [job.workers[0], job.workers[2]]
        while any(worker.returncode is None for worker in others):
            assert time.monotonic() - started < SECONDS_TO_END, [worker.output[-2000:] for worker in job.workers]
            time.sleep(0.05)
        assert [worker.returncode for worker in others] == [PEER_FAILED] * 2
        assert job.workers[1].returncode == code
        for worker in others:
            assert "tfdist: Worker 1, worker 1 (localhost:" in said(worker) and words in said(worker)


@pytest.mark.exhaustive
def test_a_worker_whose_data_do_not_come_is_named(tmp_path):
    each = [{"does_wait": index == 1, "step_timeout_seconds": 8} for index in range(2)]
    with workers.job(tmp_path, 2, f"{CASES}:wait_for_data", each=each) as job:
        job.workers[1].wait_for("waiting", 120)
        assert job.wait(60) == [PEER_FAILED, 1]
        for worker in job.workers:
            assert "worker 1 (localhost:" in said(worker).partition("did not join the others: its main thread is at ")[0]
            assert ", in rows; worker 0 (localhost:" in said(worker)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("target", "keywords"), [("wait_for_data", {"does_wait": False}), ("run_out_of_data", {})])
def test_a_step_whose_data_have_ended_is_not_waited_for(tmp_path, target, keywords):
    """Data of unknown length: the step that finds their end has begun, but does not come to its end."""
    with workers.job(tmp_path, 2, f"{CASES}:{target}", each=[keywords] * 2) as job:
        assert [running for result in job.results(100) for running in result if running] == []


def test_ctrl_c_while_data_do_not_come(tmp_path):
    """One worker waits in a step for its data, and Python's handler of signals for it; the other waits in a collective."""
    each = [{"does_wait": index == 1} for index in range(2)]
    with workers.job(tmp_path, 2, f"{CASES}:wait_for_data", each=each) as job:
        job.workers[1].wait_for("waiting", 120)
        time.sleep(1)
        started = time.monotonic()
        for worker in job.workers:
            os.kill(worker.process.pid, signal.SIGINT)
        codes = job.wait(60)
        assert time.monotonic() - started < SECONDS_TO_END
        assert codes[1] == 130
        assert "was interrupted: its main thread was at" in said(job.workers[1])
        assert "failure_cases.py:" in said(job.workers[1]) and ", in rows" in said(job.workers[1])
        assert codes[0] in (PEER_FAILED, -signal.SIGINT)


@pytest.mark.exhaustive
def test_ctrl_c_while_servers_connect(tmp_path):
    each = [{"act": "hang" if index == 1 else ""} for index in range(2)]
    with workers.job(tmp_path, 2, f"{CASES}:connect_and", each=each) as job:
        job.workers[1].wait_for("acting", 120)
        time.sleep(2)
        os.kill(job.workers[0].process.pid, signal.SIGINT)
        assert job.wait(60) == [130, PEER_FAILED]
        assert "was interrupted: its main thread was at" in said(job.workers[1])


def joined():
    if reason := hosts.why_not():
        pytest.skip(reason)
    return hosts.joined()


@contextlib.contextmanager
def job_on_hosts(folder, cable, target, **keywords):
    """Two workers, each on its host, as `workers.job` starts them on one."""
    started = []
    try:
        for index in range(2):
            own = folder / f"worker_{index}"
            own.mkdir()
            addresses = [f"{address}:2222" for address in cable.addresses]
            config = json.dumps(workers.tf_config(addresses, index))
            call = json.dumps({"target": f"{CASES}:{target}", "arguments": [], "keywords": keywords})
            command = [sys.executable, "-u", "-m", "tests.workers", call, str(own / "result.pickle")]
            environment = {**os.environ, "TF_CONFIG": config, "PYTHONPATH": str(workers.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
            with (own / "output.txt").open("wb") as output:
                process = subprocess.Popen(
                    cable.command(index, command), env=environment, cwd=workers.ROOT, stdout=output, stderr=subprocess.STDOUT
                )
            started.append(workers.Worker(f"worker {index}", process, own))
        yield workers.Job(started)
    finally:
        for worker in started:
            worker.process.kill()
            worker.process.wait()


@pytest.mark.exhaustive
@pytest.mark.parametrize("act", ["hang", "say"])
def test_a_cut_cable_ends_both_ends(tmp_path, act):
    """Each takes the other for lost: in a callback of both, and in training."""
    with (
        hosts.joined() as cable,
        job_on_hosts(tmp_path, cable, "fit_and", act=act, peer_timeout_seconds=4, grace_seconds=2) as job,
    ):
        for worker in job.workers:
            worker.wait_for("acting", 120)
        cable.pull()
        started = time.monotonic()
        assert job.wait(60) == [PEER_FAILED] * 2
        assert time.monotonic() - started < SECONDS_TO_END
        for index, worker in enumerate(job.workers):
            assert f"tfdist: Worker {1 - index}, worker {1 - index} ({cable.addresses[1 - index]}:2222), " in said(worker)
            assert "has not been heard of for" in said(worker)


@pytest.mark.exhaustive
def test_a_cable_that_is_cut_before_the_workers_meet(tmp_path):
    with joined() as cable:
        cable.pull()
        with job_on_hosts(tmp_path, cable, "make_strategy", rendezvous_timeout_seconds=6) as job:
            assert job.wait(90) == [1, 1]
            for index, worker in enumerate(job.workers):
                assert f"worker {1 - index} ({cable.addresses[1 - index]}:2222)" in worker.output
                assert "rendezvous_timeout_seconds=6" in worker.output
