"""Plans of several workers compared; the workers are threads that share a dictionary."""

import json
import threading
import types

import pytest

from tfdist.collectives import CollectivePlan, CollectiveRecord, PlanAgreement
from tfdist.collectives.agreement import first_difference
from tfdist.collectives.instance_keys import InstanceKeys
from tfdist.runtime import Cluster, Coordination, Task

TASKS = tuple(Task("worker", index, f"host{index}:1") for index in range(4))


class Store(Coordination):
    """A key-value store in memory, one view per worker."""

    def __init__(self, index, number, shared, written):
        self.errors = []
        cluster, nothing = Cluster(TASKS[:number], index), lambda *_: None
        watch = types.SimpleNamespace(check=nothing, report=lambda message, awaited: self.errors.append(message), listeners={})
        super().__init__(cluster, "test", watch)
        self._shared, self._written = shared, written

    def put(self, key, value):
        with self._written:
            self._shared.setdefault(key, value)
            self._written.notify_all()

    def get(self, key, timeout_seconds, writer=None):
        with self._written:
            if not self._written.wait_for(lambda: key in self._shared, timeout_seconds):
                raise TimeoutError(key)
            return self._shared[key]


def compare(programs, timeout_seconds=10.0, ranks_per_worker=1):
    """Runs `programs[i](agreement)` as worker i; returns each worker's error text, or None."""
    shared, written, found = {}, threading.Condition(), [None] * len(programs)

    def work(index):
        store = Store(index, len(programs), shared, written)
        try:
            programs[index](PlanAgreement(store, InstanceKeys(), timeout_seconds, ranks_per_worker))
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


def mesh_plan(local_ranks, odd=None):
    """The plan of some ranks of a 2 x 2 mesh (data, tensor); `odd` is the group in which these ranks do something else."""
    made = CollectivePlan(4, local_ranks=local_ranks)
    for rank in local_ranks:
        for group in ((rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)):  # tensor, data
            for op in ("all_gather", "all_reduce" if group == odd else "reduce_scatter"):
                made.add(rank, CollectiveRecord(op, group, (8,), "float32"))
    return made


@pytest.mark.parametrize("odd", [(0, 2), (1, 3)])
def test_two_devices_a_worker(odd):
    """The workers have the data groups in common; a difference is found in each of them."""
    plans = [mesh_plan((0, 1)), mesh_plan((2, 3), odd)]
    errors = compare([lambda a, plan=plan: a.check(plan) for plan in plans], ranks_per_worker=2)
    assert f"collective 1 of ranks {list(odd)} is reduce_scatter '' of float32[8]" in errors[0] and "worker 1" in errors[0]
    assert f"collective 1 of ranks {list(odd)} is all_reduce '' of float32[8]" in errors[1] and "worker 0" in errors[1]


def test_two_devices_a_worker_that_agree_or_differ_among_themselves():
    plans = [mesh_plan((0, 1)), mesh_plan((2, 3))]
    assert compare([lambda a, plan=plan: a.check(plan) for plan in plans], ranks_per_worker=2) == [None, None]
    plans = [mesh_plan((0, 1), (0, 1)), mesh_plan((2, 3))]  # a group of one worker is no other's matter
    assert compare([lambda a, plan=plan: a.check(plan) for plan in plans], ranks_per_worker=2) == [None, None]


@pytest.mark.parametrize(("odd", "other", "bystanders"), [((2, 3), 2, (0, 1)), ((1, 3), 1, (0, 2))])
def test_four_workers_on_a_mesh_of_two_by_two(odd, other, bystanders):
    """The last worker differs in one group: the other one that has a part in it is told, and in a job all others by these two."""
    plans = [mesh_plan((rank,), odd if rank == 3 else None) for rank in range(4)]
    errors = compare([lambda a, plan=plan: a.check(plan) for plan in plans])
    assert f"collective 1 of ranks {list(odd)} is all_reduce" in errors[3] and f"on worker {other} (" in errors[3]
    assert f"collective 1 of ranks {list(odd)} is reduce_scatter" in errors[other] and "on worker 3 (" in errors[other]
    assert [errors[rank] for rank in bystanders] == [None, None]


def chained_plan(local_ranks, orders, world_size):
    """The plan of some ranks, each of which runs an all-reduce of every group in `orders[rank]`, in that order."""
    made = CollectivePlan(world_size, local_ranks=local_ranks)
    for rank in local_ranks:
        for group in orders[rank]:
            made.add(rank, CollectiveRecord("all_reduce", group, (8,), "float32", "of " + "".join(map(str, group))))
    made.check_complete()  # within each worker all is well
    return made


def compare_orders(orders, ranks_per_worker=1):
    workers = range(len(orders) // ranks_per_worker)
    ranks = [range(each * ranks_per_worker, (each + 1) * ranks_per_worker) for each in workers]
    plans = [chained_plan(tuple(local), orders, len(orders)) for local in ranks]
    return compare([lambda a, plan=plan: a.check(plan) for plan in plans], ranks_per_worker=ranks_per_worker)


AB, CD, AC, BD = (0, 1), (2, 3), (0, 2), (1, 3)  # of a 2 x 2 mesh


@pytest.mark.parametrize("ranks_per_worker", [1, 2])
def test_ranks_of_workers_that_wait_in_a_circle(ranks_per_worker):
    """AB before AC, AC before CD, CD before BD, and BD before AB: no worker can see that for itself."""
    errors = compare_orders([[AB, AC], [BD, AB], [AC, CD], [CD, BD]], ranks_per_worker)
    for worker, error in enumerate(errors):
        assert "Ranks would wait for each other for ever: rank 0 (worker 0 (host0:1)) in" in error
        assert "must run the groups' collectives in one order" in error
        for rank, first in enumerate([AB, BD, AC, CD]):
            there, label = rank // ranks_per_worker, "of " + "".join(map(str, first))
            what = f"all_reduce {label!r} of {list(first)}" if there == worker else f"one of {list(first)}"
            assert f"rank {rank} (worker {there} (host{there}:1)) in {what}" in error


@pytest.mark.parametrize("ranks_per_worker", [1, 2])
def test_one_order_is_no_circle(ranks_per_worker):
    assert compare_orders([[AB, AC], [AB, BD], [CD, AC], [CD, BD]], ranks_per_worker) == [None] * (4 // ranks_per_worker)
    assert compare_orders([[AB, AC], [AB, BD], [AC, CD], [BD, CD]], ranks_per_worker) == [None] * (4 // ranks_per_worker)


def test_a_circle_among_some_workers_is_told_to_all():
    """The last one has no part in it."""
    everyone, first, second, third = (0, 1, 2, 3), (0, 1), (1, 2), (0, 2)
    errors = compare_orders([[everyone, first, third], [everyone, second, first], [everyone, third, second], [everyone]])
    assert all("Ranks would wait for each other for ever" in error and "rank 3" not in error for error in errors)


def test_workers_that_run_the_same_stand_for_each_other():
    """Two pairs of workers, of which the pairs differ; within a pair the same groups, but for those of each worker alone."""
    halves = [(0, 2), (1, 3)], [(4, 6), (5, 7)]
    everyone = tuple(range(8))
    own = [(rank // 2 * 2, rank // 2 * 2 + 1) for rank in range(8)]
    half = [halves[rank // 4][rank % 2] for rank in range(8)]
    good = [[everyone, own[rank], half[rank]] for rank in range(8)]
    assert compare_orders(good, 2) == [None] * 4
    # In the second pair of workers one device has its own group first, the other last.
    bad = [[everyone, half[rank], own[rank]] if rank in (4, 7) else chain for rank, chain in enumerate(good)]
    errors = compare_orders(bad, 2)
    assert all("Ranks would wait for each other for ever" in error for error in errors)
    assert all(f"rank {rank} (" in error for rank in (4, 5, 6, 7) for error in errors[2:])


def test_what_moves_within_one_worker_is_looked_at_again():
    """One worker traces a step once more, and only the collectives of its own devices are elsewhere: nobody is asked."""
    orders = [[AB, AC], [AB, BD], [AC, CD], [CD, BD]]
    moved = [[AC, AB], [BD, AB], *orders[2:]], [[AB, AC], [BD, AB], *orders[2:]]

    def check(local, *all_orders):
        return lambda agreement: [agreement.check(chained_plan(local, one, 4)) for one in all_orders]

    assert compare([check((0, 1), orders, moved[0]), check((2, 3), orders)], ranks_per_worker=2) == [None, None]
    errors = compare([check((0, 1), orders, moved[1]), check((2, 3), orders)], ranks_per_worker=2)
    assert "Ranks would wait for each other for ever" in errors[0] and errors[1] is None


def test_programs_that_differ_elsewhere_are_no_circle():
    """Rank 1 runs one collective more than rank 2: those two are told, and the first worker has no part in it."""
    orders = [[(0, 3)], [(1, 2), (1, 2)], [(1, 2)], [(0, 3)]]
    errors = compare_orders(orders)
    assert [errors[0], errors[3]] == [None, None]
    assert all("collective 1 of ranks [1, 2] is" in error for error in errors[1:3])
    assert "collective 0 of ranks [1, 2] is missing" in compare_orders([[(0, 3)], [(1, 2)], [], [(0, 3)]])[2]


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
        agreement.coordination.meet("the creation of a variable", "float32[3]", 5.0)

    errors = compare([lambda a: a.check(plan(0, *SAME)), lambda a: a.check(plan(1, *SAME)), elsewhere])
    assert "worker 2 (host2:1) is at the creation of a variable float32[3]" in errors[0]
    assert "worker 2 (host2:1) is at the creation of a variable float32[3], when" in errors[2]


def test_first_difference():
    one = [["all_gather", 1, "a"], ["all_reduce", 2, "b"]]
    assert first_difference(one, json.loads(json.dumps(one))) is None
    assert first_difference(one, [["all_gather", 1, "other label"], ["all_reduce", 2, "b"]]) is None
    assert first_difference(one, one[:1]) == first_difference(one[:1], one) == 1
    assert first_difference(one, [["all_gather", 3, "a"], one[1]]) == 0
