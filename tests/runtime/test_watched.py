"""Which waiting is for ever: workers that have come to a meeting and a program in different orders, and no other."""

import types

import pytest

from tfdist.runtime.watched import Watched, meeting_of, who_never_comes


def watched(program, completed, meetings, waits_at=""):
    """A strategy of 3 workers of 2 ranks, which runs the 6th `program` and has come to so many `meetings`."""
    progress = types.SimpleNamespace(running=lambda: {0: (6, program)}, completed=lambda: {"step 1": completed})
    return Watched(progress, types.SimpleNamespace(meetings=meetings, waits_at=waits_at), 600.0, 2)


def program_of(name="step 1", ranks=(0, 1, 2, 3, 4, 5)):
    return types.SimpleNamespace(name=name, concerns=lambda others: bool(set(others) & set(ranks)))


def beat(number=3, completed=5, strategy=0):
    return {"meeting": (strategy, {"at": "save/begin", "number": number, "completed": {"step 1": completed}})}


@pytest.mark.parametrize(
    ("program", "of_other", "found"),
    [
        (program_of(), beat(), (1, "save/begin")),
        (program_of(), beat(completed=6), (None, "")),  # it has done this step, and waits for the one that is slow
        (program_of(), beat(number=2), (None, "")),  # this worker has come to the meeting, too: it waits for a third one
        (program_of(), {"meeting": None}, (None, "")),
        (program_of(), beat(strategy=1), (None, "")),  # of a strategy that is not there yet
        (program_of(name=""), beat(), (None, "")),  # nobody knows what it is on other workers
        (program_of(ranks=(0, 1, 4, 5)), beat(), (None, "")),  # the other worker has no part in it
    ],
)
def test_who_waits_for_each_other_for_ever(program, of_other, found):
    assert who_never_comes([watched(program, completed=5, meetings=2)], {1: of_other}, program) == found


def test_a_program_that_has_ended_meanwhile_does_not_count():
    program = program_of()
    assert who_never_comes([watched(program_of(), 5, 2)], {1: beat()}, program) == (None, "")


def test_where_a_worker_waits_is_told():
    found = meeting_of([watched(program_of(), 5, 2), watched(program_of(), 5, 3, "save/begin")])
    assert found == (1, {"at": "save/begin", "number": 3, "completed": {"step 1": 5}})
    assert meeting_of([watched(program_of(), 5, 2)]) is None
