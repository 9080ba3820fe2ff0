"""Schedules that can run are accepted, and the others refused in words that say why."""

import functools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.extensions.pipeline import (
    Action,
    Phase,
    Schedule,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZeroBubble,
    validate,
)
from tfdist.extensions.pipeline.schedules.dataflow import inputs_of
from tfdist.extensions.pipeline.schedules.grid import parse_grid

F, B, I, W = Phase  # noqa: E741


def table_of(text):
    return dict(enumerate(parse_grid(text)))


def refused(text):
    with pytest.raises(ValueError) as error:
        validate(table_of(text))
    return str(error.value)


@st.composite
def random_orders(draw):
    """Orders that can run, of ranks that take at random one of the actions whose inputs are there."""
    num_ranks, stages_per_rank = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_microbatches = draw(st.integers(1, 5))
    pick = random.Random(draw(st.integers(0, 10**9)))
    waiting = []
    for stage_index in range(num_ranks * stages_per_rank):
        for microbatch in range(num_microbatches):
            phases = pick.choice([(F, B), (F, I, W)])
            waiting += [Action(stage_index, phase, microbatch) for phase in phases]
    every = set(waiting)
    orders = {rank: [] for rank in range(num_ranks)}
    done = set()
    while waiting:
        action = pick.choice([action for action in waiting if done.issuperset(inputs_of(action, every))])
        waiting.remove(action)
        done.add(action)
        orders[action.stage_index % num_ranks].append(action)
    return orders


@given(random_orders())
def test_every_order_that_data_flow_permits_is_accepted(orders):
    schedule = Schedule.from_table(orders)
    assert schedule.orders == orders
    assert schedule.aligned().orders == orders
    validate(schedule)


@given(random_orders(), st.randoms(use_true_random=False))
def test_a_dropped_action_is_noticed(orders, pick):
    action = pick.choice(pick.choice(list(orders.values())))
    orders[action.stage_index % len(orders)].remove(action)
    with pytest.raises(ValueError, match="`schedule` must take every microbatch through every stage") as error:
        Schedule.from_table(orders)
    assert f"microbatch {action.microbatch} through stage {action.stage_index} by" in str(error.value)


@given(random_orders(), st.randoms(use_true_random=False))
def test_a_repeated_action_is_noticed(orders, pick):
    order = pick.choice(list(orders.values()))
    action = pick.choice(order)
    order.insert(pick.randint(0, len(order)), action)
    with pytest.raises(ValueError, match=f"`schedule` must run {action} once. Received: times=2") as error:
        Schedule.from_table(orders)
    assert str(error.value).count(f">{action}<") == 2


@given(random_orders(), st.randoms(use_true_random=False))
def test_an_action_before_what_it_needs_is_noticed(orders, pick):
    """Any two actions of a rank, one of which needs the other, directly or over other ranks, change places."""
    every = {action for actions in orders.values() for action in actions}

    @functools.cache
    def needs(action):
        return {found for needed in inputs_of(action, every) for found in {needed, *needs(needed)}}

    pairs = [(early, late) for actions in orders.values() for late in actions for early in actions if early in needs(late)]
    early, late = pick.choice(pairs)
    order = orders[early.stage_index % len(orders)]
    first, second = order.index(early), order.index(late)
    order[first], order[second] = late, early
    with pytest.raises(ValueError, match="which needs its result|wait for each other in a circle"):
        Schedule.from_table(orders)


@given(random_orders())
def test_an_action_on_another_rank_is_noticed(orders):
    if len(orders) > 1:
        action = orders[1].pop()
        orders[0].append(action)
        with pytest.raises(ValueError, match=f"`schedule` must run {action} on rank 1: stage") as error:
            Schedule.from_table(orders)
        assert f"% {len(orders)}. Received: rank=0." in str(error.value)


@pytest.mark.parametrize("schedule", ["0F0 0I0", "0F0 0W0", "0F0 0B0 0W0", "0F0 0B0 0I0 0W0", "0B0", "0F0", "0I0 0W0"])
def test_backwards_that_are_not_whole(schedule):
    text = refused(schedule)
    assert "microbatch 0 through stage 0 by 0F0 and 0B0, or by 0F0, 0I0 and 0W0. Received: actions=[" in text
    assert all(f">{word}<" in text for word in schedule.split())


@pytest.mark.parametrize(
    ("schedule", "early", "late"), [("0B0 0F0", "0F0", "0B0"), ("0F0 0W0 0I0", "0I0", "0W0"), ("1F0 0F0 1B0 0B0", "0F0", "1F0")]
)
def test_an_order_within_a_rank(schedule, early, late):
    text = refused(schedule)
    assert f"`schedule` must run {early} before {late}, which needs its result; rank 0 runs it after.\n" in text
    assert f">{late}<" in text


def test_a_circle_is_named():
    text = refused("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1")
    assert text.splitlines() == [
        "`schedule` must not let ranks wait for each other in a circle: 0B0 (rank 0) waits for 1B0, which rank 1 runs after 1F1; "
        "1F1 (rank 1) waits for 0F1, which rank 0 runs after 0B0. Move one of the actions that are waited for forward.",
        "rank 0   0F0  >0B0<  0F1   0B1",
        "rank 1  >1F1<  1F0   1B0   1B1",
    ]


def test_ranks_that_wait_for_the_circle_are_not_of_it():
    """Rank 0 waits for rank 1, which stands in a circle with rank 2."""
    text = refused("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F1 2F0 2B0 2B1")
    assert "in a circle: 1B0 (rank 1) waits for 2B0, which rank 2 runs after 2F1; 2F1 (rank 2) waits for 1F1, which" in text
    assert text.count(">") == 2


def test_a_wait_for_what_is_waiting_itself():
    """Rank 0 waits for the very action at which rank 1 stands."""
    text = refused("0F0 2F0 0B0 2B0\n1F0 3F0 3B0 1B0")
    assert "in a circle: 0B0 (rank 0) waits for 1B0; 1B0 (rank 1) waits for 2B0, which rank 0 runs after 0B0. Move" in text


def test_a_table_of_another_form():
    action = Action(0, F, 0)
    for table in ({}, {1: (action,)}, {0: (action,), 2: (action,)}):
        with pytest.raises(ValueError, match="`table` must have a row for each of the ranks 0, 1, ..., and no other"):
            validate(table)
    with pytest.raises(ValueError, match=r"`table` must have rows of equal lengths. Received: slots=\{0: 1, 1: 0\}"):
        validate({0: (action,), 1: ()})
    with pytest.raises(ValueError, match="`table` must hold actions, and None for idle slots. Received: entry='0F0'"):
        validate({0: ("0F0",)})
    with pytest.raises(ValueError, match="`table` must hold at least one action"):
        validate({0: (None,)})
    with pytest.raises(ValueError, match="equally many stages on each rank, but 2 does not divide the 3 from 0 to 2") as error:
        validate(table_of("0F0 0B0 2F0 2B0\n1F0 1B0 . ."))
    assert ">2F0<" in str(error.value)


@pytest.mark.parametrize(
    ("schedule", "most"),
    [(ScheduleGPipe(3, 7), 7), (Schedule1F1B(3, 7), 3), (ScheduleZeroBubble(3, 7), 3), (ScheduleInterleaved1F1B(6, 6, 2), 8)],
)
def test_max_in_flight(schedule, most):
    validate(schedule, max_in_flight=most)
    with pytest.raises(ValueError, match=rf"at most {most - 1} microbatches of a stage on a rank; at \dF\d rank 0 hol") as error:
        validate(schedule, max_in_flight=most - 1)
    assert f"rank 0 holds {most}. Received: max_in_flight={most - 1}. Run a backward (B or W) first" in str(error.value)
    assert str(error.value).count(">") == 1
