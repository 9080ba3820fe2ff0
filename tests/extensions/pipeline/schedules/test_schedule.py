"""The value: its sizes, its forms, and the round trips between them."""

import dataclasses
import pickle

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
)

TEXT = """\
0F0 0F1   .   . 0B0 0B1
  . 1F0 1F1 1B0 1B1   ."""


@st.composite
def any_schedule(draw):
    num_ranks, num_microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    make = draw(st.sampled_from([ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZeroBubble]))
    stages_per_rank = draw(st.integers(2, 3)) if make is ScheduleInterleaved1F1B else 1
    return make(num_ranks * stages_per_rank, num_microbatches, stages_per_rank)


def test_sizes_are_inferred():
    schedule = Schedule.from_text(TEXT, name="mine")
    sizes = (schedule.num_stages, schedule.num_microbatches, schedule.stages_per_rank, schedule.num_ranks)
    assert (schedule.name, sizes) == ("mine", (2, 2, 1, 2))
    assert repr(schedule) == "Schedule(name='mine', num_stages=2, num_microbatches=2, stages_per_rank=1)"
    looped = ScheduleInterleaved1F1B(6, 4, 3)
    assert (looped.num_stages, looped.num_microbatches, looped.stages_per_rank, looped.num_ranks) == (6, 4, 3, 2)
    assert [looped.rank_of(stage_index) for stage_index in range(6)] == [0, 1, 0, 1, 0, 1]


def test_actions_and_orders():
    schedule = Schedule.from_text(TEXT)
    assert schedule.table[1][0] is None and schedule.table[1][1] == Action(1, Phase.FORWARD, 0)
    assert [str(action) for action in schedule.actions(1)] == ["1F0", "1F1", "1B0", "1B1"]
    assert schedule.orders == {0: schedule.actions(0), 1: schedule.actions(1)}


@given(any_schedule())
def test_from_text_inverts_to_text(schedule):
    assert Schedule.from_text(schedule.to_text(), name=schedule.name) == schedule
    assert str(schedule) == schedule.to_text()
    lines = schedule.to_text().splitlines()
    assert len(lines) == schedule.num_ranks and len({len(line) for line in lines}) == 1
    assert Schedule.from_text(f"# {schedule.name}\n\n{schedule.to_text()}\n", name=schedule.name) == schedule


@given(any_schedule())
def test_from_table_inverts_table(schedule):
    assert Schedule.from_table(schedule.table, name=schedule.name) == schedule
    texts = [[None if action is None else str(action) for action in row] for row in schedule.table.values()]
    assert Schedule.from_table(texts, name=schedule.name) == schedule
    without_idle_slots = Schedule.from_table(schedule.orders, name=schedule.name)
    assert without_idle_slots.orders == schedule.orders
    assert without_idle_slots.aligned() == schedule


@given(any_schedule())
def test_a_slot_is_behind_those_that_it_waits_for(schedule):
    slots = {action: slot for row in schedule.table.values() for slot, action in enumerate(row) if action is not None}
    for action, slot in slots.items():
        before = Action(action.stage_index - 1, Phase.FORWARD, action.microbatch) if action.stage_index else None
        if action.phase is Phase.FORWARD and before:
            assert slots[before] < slot
        if action.phase is Phase.BACKWARD_WEIGHT:
            assert slots[dataclasses.replace(action, phase=Phase.BACKWARD_INPUT)] < slot


def test_loose_tables():
    schedule = Schedule.from_text(TEXT)
    words = {1: ". 1F0 1F1 1B0 1B1".split(), 0: [Action.parse("0F0"), "0F1", None, ".", "0B0", "0B1"]}
    assert Schedule.from_table(words) == schedule
    assert list(Schedule.from_table(words).table) == [0, 1]


def test_render_marks():
    schedule = Schedule.from_text(TEXT)
    assert schedule.render().splitlines()[1] == "rank 1   .  1F0 1F1 1B0 1B1  ."
    assert schedule.render(Action.parse("1B0")).splitlines()[1] == "rank 1    .    1F0   1F1  >1B0<  1B1    ."


def test_it_is_a_value():
    schedule = Schedule.from_text(TEXT)
    assert schedule == Schedule.from_text(TEXT) and hash(schedule) == hash(Schedule.from_text(TEXT))
    assert schedule != Schedule1F1B(2, 2)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.name = "other"


def test_what_was_passed_in_may_change():
    table = {0: [Action(0, Phase.FORWARD, 0), Action(0, Phase.BACKWARD, 0)]}
    schedule = Schedule(table)
    table[0].pop()
    assert schedule.to_text() == "0F0 0B0"


def test_a_schedule_that_cannot_run_is_not_made():
    with pytest.raises(ValueError, match="`schedule` must run 0F0 before 0B0"):
        Schedule.from_text("0B0 0F0")
