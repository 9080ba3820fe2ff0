"""The plan: what it counts, and what it refuses."""

import pytest

from tfdist.collectives import CollectivePlan, CollectiveRecord


def record(op="all_reduce", ranks=(0, 1), shape=(6, 5), dtype="float32", label="x", source=None):
    return CollectiveRecord(op, ranks, shape, dtype, label, source)


@pytest.mark.parametrize(
    ("op", "sent"),  # of S = 120 bytes on 4 ranks
    [
        ("all_reduce", 180),
        ("all_gather", 360),
        ("reduce_scatter", 90),
        ("all_to_all", 90),
        ("broadcast", 120),
        ("send", 120),
    ],
)
def test_sent_bytes(op, sent):
    one = record(op, ranks=(0, 1, 2, 3))
    assert one.input_bytes == 120
    assert one.sent_bytes == sent


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float64", 8), ("int32", 4)])
def test_bytes_depend_on_the_dtype(dtype, itemsize):
    assert record(dtype=dtype).input_bytes == 30 * itemsize
    assert record(dtype=dtype, shape=()).input_bytes == itemsize
    assert record(dtype=dtype, shape=(3, 0)).input_bytes == 0


def test_bytes_of_an_unknown_shape():
    with pytest.raises(ValueError, match="need a static shape") as error:
        _ = record(shape=(None, 5)).sent_bytes
    assert "record=CollectiveRecord(op='all_reduce'" in str(error.value)


def test_members_may_come_in_any_order():
    plan = CollectivePlan(3)
    pair, all_ranks = record(ranks=(1, 2)), record(ranks=(0, 1, 2))
    for rank, program in {0: [all_ranks, all_ranks], 2: [pair, all_ranks, all_ranks, pair]}.items():
        for entry in program:
            plan.add(rank, entry)
    for entry in [pair, all_ranks, all_ranks, pair]:
        plan.add(1, entry)
    plan.check_complete()
    assert [len(records) for records in plan.records] == [2, 4, 4]
    assert plan.counts(0) == {"all_reduce": 2}
    assert plan.sent_bytes(1) == 2 * 120 + 2 * 160
    assert plan.sequences() == {(1, 2): [pair, pair], (0, 1, 2): [all_ranks, all_ranks]}


def test_only_local_ranks_must_be_complete():
    plan = CollectivePlan(4, local_ranks=(2, 3))
    both = record(ranks=(0, 1, 2, 3))
    plan.add(2, both)
    with pytest.raises(RuntimeError, match=r"{2: 1, 3: 0}"):
        plan.check_complete()
    plan.add(3, both)
    plan.check_complete()
    assert plan.counts() == {"all_reduce": 1}
    assert plan.sent_bytes() == 180


@pytest.mark.parametrize(
    "change",
    [
        {"op": "all_gather"},
        {"shape": (6, 4)},
        {"dtype": "float64"},
        {"label": "y"},
        {"shape": (None, 5)},
        {"source": 0},
    ],
)
def test_ranks_that_disagree(change):
    plan = CollectivePlan(2)
    plan.add(0, record())
    plan.add(0, record())
    plan.add(1, record())
    with pytest.raises(RuntimeError, match=r"disagree on collective 1 of group \[0, 1\]: rank 1 runs") as error:
        plan.add(1, record(**change))
    assert repr(record()) in str(error.value)
    assert repr(record(**change)) in str(error.value)
    assert "same order" in str(error.value)


def test_a_rank_that_leaves_one_out():
    plan = CollectivePlan(3)
    both = record(ranks=(0, 2))
    plan.add(0, both)
    plan.add(0, record("all_gather", ranks=(0, 2), label="forgotten"))
    plan.add(2, both)
    with pytest.raises(RuntimeError, match=r"group \[0, 2\] run different numbers of collectives: {0: 2, 2: 1}") as error:
        plan.check_complete()
    assert "Rank 2 lacks" in str(error.value)
    assert "forgotten" in str(error.value)


def test_the_rank_traced_first_may_be_the_one_that_leaves_one_out():
    plan = CollectivePlan(2)
    plan.add(0, record())
    plan.add(1, record())
    plan.add(1, record())
    with pytest.raises(RuntimeError, match="Rank 0 lacks"):
        plan.check_complete()


def test_an_empty_plan_is_complete():
    plan = CollectivePlan(2)
    plan.check_complete()
    assert plan.counts() == {}
    assert plan.sent_bytes() == 0


def test_receivers_send_nothing():
    plan = CollectivePlan(2)
    for rank in range(2):
        plan.add(rank, CollectiveRecord("send", (0, 1), (3,), "float32", "a", source=1))
        plan.add(rank, CollectiveRecord("broadcast", (0, 1), (5,), "float32", "b", source=0))
    assert (plan.sent_bytes(0), plan.sent_bytes(1)) == (20, 12)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_ranks_that_wait_in_a_circle(num_ranks):
    """Each waits for the next; of every group all its ranks run the same."""
    plan = CollectivePlan(num_ranks)
    everyone = tuple(range(num_ranks))
    if num_ranks == 2:
        programs = {0: [(0, 1), (1, 0)], 1: [(1, 0), (0, 1)]}  # two groups of the same two
    else:
        pairs = [(rank, rank + 1) for rank in range(num_ranks - 1)] + [(0, num_ranks - 1)]
        programs = {rank: [pairs[rank], pairs[rank - 1]] for rank in everyone}
    for rank, groups in programs.items():
        for group in (everyone, *groups) if num_ranks > 2 else groups:
            plan.add(rank, record(ranks=group, label=f"of {group}"))
    with pytest.raises(RuntimeError, match="Ranks would wait for each other for ever: rank 0 in all_reduce 'of ") as error:
        plan.check_complete()
    assert all(f"rank {rank} in all_reduce" in str(error.value) for rank in everyone)


def test_a_rank_elsewhere_breaks_no_circle_and_makes_none():
    plan = CollectivePlan(3, local_ranks=(0, 1))
    for rank, groups in {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)]}.items():
        for group in groups:
            plan.add(rank, record(ranks=group))
    plan.check_complete()  # rank 2 may run (1, 2) first


def test_messages_without_an_order_wait_for_nobody():
    plan = CollectivePlan(2)
    message, both = record("message", source=0), record()
    for rank, program in enumerate([[message, both], [both, message]]):
        for one in program:
            (plan.add_message if one is message else plan.add)(rank, one)
    plan.check_complete()
