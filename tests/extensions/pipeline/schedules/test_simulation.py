"""The simulation against a clock that ticks, and its figures by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_validation import random_orders

from tfdist.extensions.pipeline import (
    Action,
    Phase,
    Schedule,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZeroBubble,
    simulate,
)
from tfdist.extensions.pipeline.schedules.dataflow import inputs_of
from tfdist.extensions.pipeline.schedules.simulation import Simulation, Span


def ticked(schedule, durations, transfer):
    """The naive version: at every tick, each rank that is free starts its next action if what it needs has arrived."""
    every = {action for actions in schedule.orders.values() for action in actions}
    orders = {rank: list(actions) for rank, actions in schedule.orders.items()}
    starts, ends, free, now = {}, {}, dict.fromkeys(orders, 0), 0
    while any(orders.values()):
        for rank, actions in orders.items():
            if actions and free[rank] <= now:
                inputs = inputs_of(actions[0], every)
                away = {needed: transfer * (schedule.rank_of(needed.stage_index) != rank) for needed in inputs}
                if all(needed in ends and ends[needed] + away[needed] <= now for needed in inputs):
                    action = actions.pop(0)
                    starts[action], ends[action] = now, now + durations[action.phase]
                    free[rank] = ends[action]
        now += 1
    return {(schedule.rank_of(action.stage_index), action, start, ends[action]) for action, start in starts.items()}


@given(random_orders(), st.tuples(*[st.integers(1, 3)] * 4), st.integers(0, 3))
def test_it_is_what_a_clock_shows(orders, times, transfer):
    schedule, durations = Schedule.from_table(orders), dict(zip(Phase, times, strict=True))
    simulation = simulate(schedule, durations, transfer)
    spans = {(span.rank, span.action, span.start, span.end) for span in simulation.spans}
    assert spans == ticked(schedule, durations, transfer)
    assert len(simulation.spans) == len(spans)
    assert simulation.spans == sorted(simulation.spans, key=lambda span: (span.start, span.rank))


@given(random_orders())
def test_slots_have_no_part_in_it(orders):
    schedule = Schedule.from_table(orders)
    assert simulate(schedule).spans == simulate(schedule.aligned()).spans


def test_by_hand():
    """
    rank 0   F0 F1 .. .. B0 B0 .. B1 B1         2 of 8 + 1 idle
    rank 1   .. F0 B0 B0 F1 B1 B1 .. ..
    """
    simulation = simulate(Schedule1F1B(2, 2))
    assert simulation.spans[0] == Span(0, Action.parse("0F0"), 0, 1)
    assert simulation.spans[-1] == Span(0, Action.parse("0B1"), 7, 9)
    assert (simulation.total_time, simulation.bubble_fraction) == (9, (2 * 9 - 12) / 12)
    assert [simulation.peak_in_flight(rank) for rank in (0, 1)] == [2, 1]


def test_transfers_cost_and_stages_of_one_rank_send_nothing():
    schedule = Schedule1F1B(3, 4)
    assert simulate(schedule, transfer=0.5).total_time > simulate(schedule).total_time
    alone = ScheduleInterleaved1F1B(3, 4, 3)
    assert alone.num_ranks == 1
    assert simulate(alone, transfer=5).total_time == simulate(alone).total_time == 4 * 3 * 3


def test_durations_may_be_some_of_them():
    assert simulate(ScheduleZeroBubble(1, 1), {Phase.BACKWARD_WEIGHT: 5}).total_time == 1 + 1 + 5


def test_measured_spans():
    """From the first start, whatever the clock then showed."""
    schedule = Schedule.from_text("0F0 0B0\n1F0 1B0")
    times = {"0F0": (100, 110), "1F0": (112, 122), "1B0": (122, 142), "0B0": (145, 165)}
    spans = [Span(int(name[0]), Action.parse(name), *span) for name, span in times.items()]
    measured = Simulation(schedule, spans)
    assert measured.total_time == 65
    assert measured.bubble_fraction == (2 * 65 - 60) / 60


@pytest.mark.parametrize("duration", [0, -1.0, float("inf"), float("nan")])
def test_durations_are_positive(duration):
    with pytest.raises(ValueError, match="`durations` must map phases to positive times. Received: phase=<Phase.FORWARD"):
        simulate(Schedule1F1B(2, 2), {Phase.FORWARD: duration})


def test_durations_are_of_phases():
    with pytest.raises(ValueError, match="`durations` must map phases to positive times. Received: phase='F', duration=1"):
        simulate(Schedule1F1B(2, 2), {"F": 1})


@pytest.mark.parametrize("transfer", [-1, float("inf"), float("nan")])
def test_transfer_is_a_time(transfer):
    with pytest.raises(ValueError, match="`transfer` must be a time of at least 0"):
        simulate(Schedule1F1B(2, 2), transfer=transfer)
