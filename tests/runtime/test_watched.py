"""Which waiting is for ever: workers that have come to two points in different orders, and no other."""

import types

import pytest

from tfdist.runtime import watched as module
from tfdist.runtime.watched import Watched, point_of, who_never_comes


def watched(program, completed=5, meetings=2, waits_at=""):
    """A strategy on worker 0 of 3 of 2 ranks each, which runs `program`, and has come to so many `meetings`."""
    counts = {"step 1": completed, "assemble": 7}
    progress = types.SimpleNamespace(running=lambda: {0: (6, program)}, completed=lambda: counts)
    cluster = types.SimpleNamespace(worker_index=0)
    return Watched(progress, types.SimpleNamespace(meetings=meetings, waits_at=waits_at, cluster=cluster), 600.0, 2)


class Program:
    def __init__(self, name="step 1", partners=(0, 1, 2, 3, 4, 5)):
        self.name = name
        self.partners = lambda: list(partners)

    def __str__(self):
        return f"a program {self.name}"


def in_meeting(number=3, completed=5, strategy=0):
    return {"point": (strategy, {"at": "there", "meetings": number, "completed": {"step 1": completed}})}


def in_program(name="assemble", completed=5, of_it=7, ranks=(0, 1, 2, 3)):
    counts = {"step 1": completed, name: of_it}
    return {"point": (0, {"at": "there", "program": name, "with": list(ranks), "completed": counts})}


@pytest.mark.parametrize(
    ("program", "other", "is_for_ever"),
    [
        (Program(), in_meeting(), True),
        (Program(), in_meeting(completed=6), False),  # it has done this step, and waits for the one that is slow
        (Program(), in_meeting(number=2), False),  # this worker has come to the meeting, too: it waits for a third one
        (Program(), {"point": None}, False),
        (Program(), {}, False),
        (Program(), in_meeting(strategy=1), False),  # of a strategy that is not there yet
        (Program(name=""), in_meeting(), False),  # nobody knows what it is on other workers
        (Program(partners=(0, 1, 4, 5)), in_meeting(), False),  # the other worker has no part in it
        (Program(), in_program(), True),
        (Program(), in_program(completed=6), False),  # it has done this step
        (Program(), in_program(of_it=6), False),  # this worker has done that one
        (Program(), in_program(ranks=(2, 3, 4, 5)), False),  # this worker has no part in it
        (Program(), in_program(name="step 1", of_it=5), False),  # both are in the same
    ],
)
def test_who_waits_for_each_other_for_ever(program, other, is_for_ever):
    found = who_never_comes([watched(program)], {1: other}, program)
    assert found == ((1, "there") if is_for_ever else (None, ""))


def test_a_program_that_has_ended_meanwhile_does_not_count():
    assert who_never_comes([watched(Program())], {1: in_meeting()}, Program()) == (None, "")


def test_a_meeting_is_a_point():
    found = point_of([watched(Program()), watched(Program(), meetings=3, waits_at="save/begin")])
    assert found is not None and found[0] == 1
    assert found[1]["at"] == "at a point where all workers must meet, save/begin" and found[1]["meetings"] == 3
    assert found[1]["completed"]["step 1"] == 5


def test_a_program_that_lasts_is_a_point(monkeypatch):
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    one = watched(Program())
    assert one.waiting(True)[0][0] == 0 and point_of([one]) is None
    now = 105.0
    assert one.waiting(True)[0][0] == 5
    assert point_of([one]) == (
        0,
        {"at": "in a program step 1", "program": "step 1", "with": [*range(6)], "completed": {"step 1": 5, "assemble": 7}},
    )
    assert one.waiting(False) == [] and point_of([one]) is None
