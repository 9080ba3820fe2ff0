"""Failures speak: nobody hangs, and every worker's last words name the worker and what happened."""

import contextlib
import socket
import time

import pytest
from grids import exhaustive

from tests import workers

CASES = "tests.strategy.failure_cases"
PEER_FAILED = 78
SECONDS_TO_END = 50  # the longest takes 23 on a machine that does nothing else


def last_lines(worker, number=4):
    return "\n".join(worker.output.strip().splitlines()[-number:])


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("act", "victim", "code", "words"),
    [
        exhaustive("die", 2, -9, "died: its process is gone"),
        ("die", 0, -9, "died: its process is gone"),
        exhaustive("terminate", 1, -15, "died: its process is gone"),
        ("raise", 2, 1, "raised ValueError: the data of this worker are spoilt"),
        ("leave", 1, 0, "ended its program while"),
    ],
)
def test_one_worker_ends_all_in_time_and_is_named(tmp_path, act, victim, code, words):
    each = [{"act": act if index == victim else ""} for index in range(3)]
    programs = [victim] if act == "leave" else []  # how Python ends it is what is tested
    with workers.job(tmp_path, 3, f"{CASES}:fit_and", each=each, programs=programs) as job:
        job.workers[victim].wait_for("acting", 120)
        acted = time.monotonic()
        codes = job.wait(60)
        assert time.monotonic() - acted < SECONDS_TO_END
    assert codes[victim] == code
    for index, worker in enumerate(job.workers):
        if index != victim:
            assert codes[index] == PEER_FAILED, worker.output[-3000:]
            assert f"tfdist: Worker {victim}, worker {victim} (localhost:" in last_lines(worker), worker.output[-3000:]
            assert words in last_lines(worker)
            assert worker.output.count("no worker can train without the others") <= 3


@pytest.mark.timeout(200)
def test_a_worker_that_hangs_is_told_by_the_step_timeout(tmp_path):
    """It is named, with the place where it hangs, and not the one that waits for it."""
    each = [{"act": "hang" if index == 1 else "", "step_timeout_seconds": 6} for index in range(2)]
    with workers.job(tmp_path, 2, f"{CASES}:fit_and", each=each, programs=[0]) as job:
        job.workers[1].wait_for("acting", 120)
        acted = time.monotonic()
        codes = job.wait(60)
        assert time.monotonic() - acted < 6 + SECONDS_TO_END
    assert codes == [PEER_FAILED, 1], (codes, job.workers[1].output[-2000:])
    for worker, who in zip(job.workers, ["Worker 1", "This worker"], strict=True):
        assert f"tfdist: {who}, worker 1 (localhost:" in last_lines(worker)
        assert "failure_cases.py:" in last_lines(worker) and ", in hang; worker 0 (localhost:" in last_lines(worker)
        assert "(`step_timeout_seconds`)" in last_lines(worker)
        assert "Traceback" not in worker.output


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("width", "Workers make different variables"),
        exhaustive("layers", "Workers make different variables"),
        exhaustive("optimizer", "the optimizer is Adam("),
        ("setting of the optimizer", "epsilon=0.001"),
        ("own collective", "all_gather 'all_gather' of float32[2]"),
        ("data", "Every worker must be given the same dataset"),
        ("only the chief evaluates", "Every worker must be given the same dataset"),
    ],
)
def test_different_programs_are_told_before_they_hang(tmp_path, case, words):
    with workers.job(
        tmp_path, 2, f"{CASES}:different_programs", case, each=[{"worker_index": index} for index in range(2)]
    ) as job:
        codes = job.wait(100)
    for code, worker in zip(codes, job.workers, strict=True):
        assert code not in (0, -9), worker.output[-3000:]
        assert words in worker.output, worker.output[-3000:]
        assert "not caught" not in worker.output


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("number", "axis"), [exhaustive(2, "data"), (4, "tensor"), exhaustive(4, "data")])
def test_different_programs_on_a_mesh_are_told_before_they_hang(tmp_path, number, axis):
    """Two workers with two devices each, or four with one: the last differs, and all end, those too that have no part in it."""
    each = [{"worker_index": index, "odd": number - 1, "axis": axis} for index in range(number)]
    case, devices = f"{CASES}:different_collectives", 4 // number
    with workers.job(tmp_path, number, case, each=each, devices_per_worker=devices) as job:
        codes = job.wait(100)
    for code, worker in zip(codes, job.workers, strict=True):
        assert code not in (0, -9) and "agreed" in worker.output and "not caught" not in worker.output, worker.output[-3000:]
        assert "Workers run different programs: collective" in worker.output, worker.output[-3000:]
        assert "of ranks [2, 3]" in worker.output or axis == "data" and "of ranks [1, 3]" in worker.output or number == 2


@pytest.mark.exhaustive
@pytest.mark.timeout(200)
def test_ranks_of_two_workers_in_a_circle_are_told_before_they_hang(tmp_path):
    with workers.job(tmp_path, 2, f"{CASES}:circle", devices_per_worker=2) as job:
        codes = job.wait(100)
    for code, worker in zip(codes, job.workers, strict=True):
        assert code not in (0, -9) and "not caught" not in worker.output, worker.output[-3000:]
        assert "Ranks would wait for each other for ever: rank 0 (worker 0 (" in last_lines(worker), worker.output[-3000:]


@pytest.mark.timeout(200)
def test_settings_that_differ(tmp_path):
    with workers.job(tmp_path, 2, f"{CASES}:settings_differ", each=[{"worker_index": index} for index in range(2)]) as job:
        results = job.results(100)
    for stage, size in results:
        assert "`zero_stage` is" in stage and "worker 0 (localhost:" in stage and "worker 1 (localhost:" in stage
        assert "`bucket_bytes` is" in size


@pytest.mark.timeout(200)
def test_unequal_numbers_of_devices(tmp_path):
    with workers.job(
        tmp_path,
        2,
        f"{CASES}:make_strategy_on",
        each=[{"devices": 1}, {"devices": 2}],
        environment={"TFDIST_DEVICES_PER_WORKER": ""},
    ) as job:
        codes = job.wait(100)
    for code, worker in zip(codes, job.workers, strict=True):
        assert code != 0
        assert "`devices per worker` is" in worker.output, worker.output[-2000:]


@pytest.mark.timeout(200)
def test_no_worker_leaves_while_others_may_fetch_from_it(tmp_path):
    """The last collective of a program is over for who sends before it is for who receives."""
    with workers.job(tmp_path, 2, f"{CASES}:end_after", each=[{"seconds": 3}, {"seconds": 0}]) as job:
        while job.workers[1].returncode is None:
            time.sleep(0.05)
        assert "over" in job.workers[0].output
        assert job.wait(100) == [0, 0]


@pytest.mark.timeout(200)
def test_a_late_worker_is_waited_for(tmp_path):
    with workers.job(tmp_path, 2, f"{CASES}:make_strategy", delays=[0, 4]) as job:
        assert job.results(100) == [2, 2]


@pytest.mark.timeout(200)
def test_a_worker_that_never_comes(tmp_path):
    """Whichever of two it is: two jobs that wait at once."""
    settings = {"each": [{"rendezvous_timeout_seconds": 4}] * 2}
    ports = [workers.free_ports(2) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        jobs = [
            workers.job(tmp_path / str(present), 2, f"{CASES}:make_strategy", ports=ports[present], only=[present], **settings)
            for present in range(2)
        ]
        started = time.monotonic()
        jobs = [stack.enter_context(job) for job in jobs]
        codes = [job.wait(100) for job in jobs]
        assert time.monotonic() - started < 4 + SECONDS_TO_END
    assert codes == [[1], [1]]
    for present, job in enumerate(jobs):
        output = job.workers[0].output
        assert "rendezvous_timeout_seconds=4" in output, output[-2000:]
        assert f"localhost:{ports[present][1 - present]}" in output


@pytest.mark.timeout(200)
def test_a_port_in_use(tmp_path):
    ports = workers.free_ports(2)
    with socket.socket() as taken:
        taken.bind(("", ports[1]))
        taken.listen()
        with workers.job(tmp_path, 2, f"{CASES}:make_strategy", ports=ports, each=[{"rendezvous_timeout_seconds": 8}] * 2) as job:
            codes = job.wait(100)
    assert codes == [1, 1]
    assert f"port {ports[1]}, which TF_CONFIG gives it, cannot be used" in job.workers[1].output
    assert f"worker 1 (localhost:{ports[1]})" in job.workers[0].output
