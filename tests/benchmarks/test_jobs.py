"""The processes of a case: their variables, their answers and their end. They run a few lines instead of a benchmark."""

import json
import os
import sys
import time

import pytest

from benchmarks.cases import Case
from benchmarks.job import Job, JobError

CHILD = """
import json, os, sys, time
names = ("TF_CONFIG", "RANK", "WORLD_SIZE", "LOCAL_RANK")
for line in sys.stdin:
    request = json.loads(line)
    rank = int(os.environ.get("RANK", 0))
    if request.get("die") == rank:
        sys.exit(3)
    if request.get("hang") == rank:
        time.sleep(600)
    print(json.dumps({"pid": os.getpid(), **{name: os.environ.get(name) for name in names}}), flush=True)
"""


def job(contender, devices=2, multi_worker=False, timeout_seconds=60):
    case = Case(contender, "mlp", devices, 1, 1, 4, multi_worker=multi_worker)
    program = [sys.executable, "-c", CHILD]
    return Job("steps", case, environment={}, timeout_seconds=timeout_seconds, program=program)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("contender", ["ddp", "fsdp2", "ds3"])
def test_a_peer_has_a_process_a_rank(contender):
    with job(contender) as started:
        assert [answer["RANK"] for answer in started.ready] == ["0", "1"]
        assert [answer["LOCAL_RANK"] for answer in started.ready] == ["0", "1"]
        assert {answer["WORLD_SIZE"] for answer in started.ready} == {"2"}
        assert {answer["TF_CONFIG"] for answer in started.ready} == {None}


def test_one_process_of_pytorch():
    with job("torch-single", devices=1) as started:
        assert [answer["WORLD_SIZE"] for answer in started.ready] == ["1"]


def test_workers_have_a_place_in_a_cluster():
    with job("zero3", multi_worker=True) as started:
        places = [json.loads(answer["TF_CONFIG"])["task"]["index"] for answer in started.ready]
        assert places == [0, 1]


@pytest.mark.parametrize(("what", "reason"), [("die", "ended with exit code 3"), ("hang", "no answer in 5 s, killed")])
def test_a_rank_that_fails_ends_the_job(what, reason):
    with job("ddp", timeout_seconds=5 if what == "hang" else 60) as started, pytest.raises(JobError, match=reason):
        started.ask({what: 1})
    assert not any(is_alive(answer["pid"]) for answer in started.ready)


def test_an_interrupt_ends_the_processes_at_once():
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), job("ddp") as started:
        for process in started._processes:
            process.send({"hang": 0})
            process.send({"hang": 1})
        raise KeyboardInterrupt
    assert not any(is_alive(answer["pid"]) for answer in started.ready)
    assert time.monotonic() - start < 60
