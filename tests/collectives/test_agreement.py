"""Plans of several workers compared; the workers are threads that share a dictionary."""

import json
import threading

import pytest

from tfdist.collectives import CollectivePlan, CollectiveRecord, PlanAgreement
from tfdist.collectives.agreement import first_difference
from tfdist.collectives.instance_keys import InstanceKeys
from tfdist.runtime import Cluster, Coordination, Task

TASKS = tuple(Task("worker", index, f"host{index}:1") for index in range(3))


class Store(Coordination):
    """A key-value store in memory, one view per worker."""

    def __init__(self, index, shared, written):
        self.errors = []
        super().__init__(Cluster(TASKS, index), "test", report=lambda message, awaited: self.errors.append(message))
        self._shared, self._written = shared, written

    def put(self, key, value):
        with self._written:
            new = key not in self._shared
            self._shared.setdefault(key, value)
            self._written.notify_all()
        return new

    def poll(self, key, seconds):
        with self._written:
            self._written.wait_for(lambda: key in self._shared, seconds)
            return self._shared.get(key)


def compare(programs, timeout_seconds=10.0):
    """Runs `programs[i](agreement)` as worker i; returns each worker's error text, or None."""
    shared, written, found = {}, threading.Condition(), [None] * len(programs)

    def work(index):
        store = Store(index, shared, written)
        try:
            programs[index](PlanAgreement(store, InstanceKeys(), timeout_seconds))
        except RuntimeError as error:
            found[index] = str(error)
            assert store.errors == [str(error)], "the other workers are told"

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def plan(rank, *records, notes=(), label="x"):
    made = CollectivePlan(3, local_ranks=(rank,))
    for op, shape in records:
        made.add(rank, CollectiveRecord(op, (0, 1, 2), shape, "float32", label))
    for note in notes:
        made.note(rank, note)
    return made


SAME = [("all_gather", (8,)), ("reduce_scatter", (3, 8))]


def test_equal_plans_agree_whatever_their_labels():
    assert compare([lambda a, r=rank: a.check(plan(r, *SAME, label=f"layer_{r}")) for rank in range(3)]) == [None] * 3


def test_a_plan_is_compared_once():
    def once(rank):
        def run(agreement):
            agreement.check(plan(rank, *SAME))
            for _ in range(rank):  # traced again on some workers only
                agreement.check(plan(rank, *SAME))
            agreement.check(plan(rank, SAME[0]))

        return run

    assert compare([once(rank) for rank in range(3)]) == [None] * 3


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ([("all_gather", (9,)), SAME[1]], "collective 0 of ranks [0, 1, 2] is all_gather 'x' of float32[9]"),
        ([SAME[0], ("all_reduce", (3, 8))], "collective 1 of ranks [0, 1, 2] is all_reduce 'x' of float32[3, 8]"),
        ([SAME[0]], "is missing (there are 1)"),
        ([*SAME, SAME[0]], "collective 2 of ranks [0, 1, 2]"),
    ],
)
def test_every_worker_is_told_the_first_difference(odd, words):
    programs = [lambda a, r=rank: a.check(plan(r, *(odd if r == 2 else SAME))) for rank in range(3)]
    errors = compare(programs)
    for error in errors:
        assert "Workers run different programs" in error and "worker 2 (host2:1)" in error
    assert words in errors[2]


def test_notes_must_agree_too():
    notes = [["the optimizer is Adam()"], ["the optimizer is Adam()"], ["the optimizer is SGD()"]]
    errors = compare([lambda a, r=rank: a.check(plan(r, *SAME, notes=notes[r])) for rank in range(3)])
    assert "the optimizer is SGD() on worker 2 (host2:1), but the optimizer is Adam() on worker 0" in errors[2]
    assert all(errors)


def test_a_worker_that_traces_nothing_is_named():
    programs = [lambda a, r=rank: a.check(plan(r, *SAME)) for rank in range(2)] + [lambda a: None]
    errors = compare(programs, timeout_seconds=0.5)
    assert errors[2] is None
    for error in errors[:2]:
        assert "no answer within 0.5 s from worker 2 (host2:1)" in error and "only one worker runs" in error


def test_a_worker_that_does_something_else_is_named():
    def elsewhere(agreement):
        agreement._coordination.meet("the creation of a variable", "float32[3]", 5.0)

    errors = compare([lambda a: a.check(plan(0, *SAME)), lambda a: a.check(plan(1, *SAME)), elsewhere])
    assert "worker 2 (host2:1) is at the creation of a variable float32[3]" in errors[0]
    assert "worker 2 (host2:1) is at the creation of a variable float32[3], when" in errors[2]


def test_first_difference():
    one = [["all_gather", 1, "a"], ["all_reduce", 2, "b"]]
    assert first_difference(one, json.loads(json.dumps(one))) is None
    assert first_difference(one, [["all_gather", 1, "other label"], ["all_reduce", 2, "b"]]) is None
    assert first_difference(one, one[:1]) == first_difference(one[:1], one) == 1
    assert first_difference(one, [["all_gather", 3, "a"], one[1]]) == 0
