"""What a failure watch says of a job in which all wait; tests/strategy/test_watching.py ends and stops workers."""

import threading
import types

import pytest

from tfdist.runtime import Cluster, FailureWatch, Task
from tfdist.runtime.failure import Failure

CLUSTER = Cluster(tuple(Task("worker", index, f"host{index}:1") for index in range(3)), 0)


@pytest.fixture
def watch():
    made = FailureWatch(CLUSTER, lambda message: None, 30.0)
    made._peers = types.SimpleNamespace(silences=lambda: {1: 0.0, 2: 0.0}, tell=lambda word: None)
    return made


def beat(idle=0.0, beside=""):
    return {"at": "train.py:9, in step", "beside": beside, "idle": idle}


def test_who_waits_for_nobody_is_behind(watch):
    watch._beats = {1: beat(), 2: beat(idle=31.0, beside="data.py:7, in read")}
    found = watch._behind(600.0, "a step")
    assert found.worker_index == 2 and found.is_of_program
    assert found.what == (
        "did not join the others: its main thread is at train.py:9, in step, with another thread at data.py:7, in read; "
        "worker 0 (host0:1) has waited for 600 s (`step_timeout_seconds`) in a step"
    )


def test_all_wait_and_one_reads(watch):
    """Nobody said that worker 2 is the one who does something else."""
    watch._beats = {1: beat(), 2: beat(beside="data.py:7, in read")}
    found = watch._behind(600.0, "a step")
    assert found.worker_index is None and "worker 2 alone runs code of its own" in found.what
    assert "worker 0 at " in found.what, "where this worker is"
    assert "worker 2 at train.py:9, in step, with another thread at data.py:7, in read" in found.what
    watch._beats[1] = beat(beside="data.py:7, in read")
    assert "alone" not in watch._behind(600.0, "a step").what


def test_who_has_ended_early(watch):
    """As when the chief alone saves: it was not said where it does."""
    watch._ended = {1: 0.0}
    assert watch._stuck([(5.0, 600.0, "a step")]) is None
    found = watch._stuck([(11.0, 600.0, "a step")])
    assert found.worker_index == 1 and found.is_of_program
    assert found.what.startswith("ended its program while worker 0 (host0:1) was waiting for it in a step, at /")
    with pytest.raises(RuntimeError, match="Worker 1, .* was waiting for it, at .*: what one worker does, all must do"):
        watch.check(awaited=1)


def test_advice():
    assert "Start the job again; with" in Failure(1, "died: its process is gone").message(CLUSTER)
    raised = Failure(1, "raised ValueError: no (train.py, line 3)", is_of_program=True)
    assert "Mend that, and start the job again; with" in raised.message(CLUSTER)
    assert Failure.from_word(raised.to_word()) == raised


def test_the_place_of_another_thread(watch, monkeypatch):
    monkeypatch.setattr("tfdist.runtime.standing._is_in_tensorflow", lambda frame: True)
    end, begun = threading.Event(), threading.Event()

    def read():
        begun.set()
        end.wait()

    thread = threading.Thread(target=read)
    thread.start()
    begun.wait()
    try:
        assert watch._own_beat()["beside"].endswith(", in read")
    finally:
        end.set()
        thread.join()
