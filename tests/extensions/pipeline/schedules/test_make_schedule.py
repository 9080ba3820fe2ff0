"""What may be passed where a schedule is asked for."""

import pytest

from tfdist.extensions.pipeline import (
    Schedule,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZeroBubble,
    make_schedule,
)

GRID = "0F0 0F1   .   . 0B0 0B1\n  . 1F0 1F1 1B0 1B1   ."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *[(name, ScheduleGPipe(4, 3)) for name in ("gpipe", "GPipe", "ScheduleGPipe")],
        *[(name, Schedule1F1B(4, 3)) for name in ("1f1b", "1F1B", "Schedule1F1B", "PipeDream-Flush")],
        *[(name, ScheduleZeroBubble(4, 3)) for name in ("zero_bubble", "Zero Bubble", "zb", "ZB-H1", "ScheduleZeroBubble")],
    ],
)
def test_names(name, expected):
    assert make_schedule(name, 4, 3) == make_schedule(name, num_stages=4, num_microbatches=3, stages_per_rank=1) == expected


@pytest.mark.parametrize("name", ["interleaved", "Interleaved1F1B", "interleaved_1f1b", "ScheduleInterleaved1F1B"])
def test_names_of_the_interleaved(name):
    assert make_schedule(name, 4, 3, 2) == ScheduleInterleaved1F1B(4, 3, 2)
    with pytest.raises(ValueError, match="`stages_per_rank` of `ScheduleInterleaved1F1B` must be at least 2"):
        make_schedule(name, 4, 3)


def test_a_schedule_that_is_there():
    schedule = Schedule1F1B(2, 2)
    assert make_schedule(schedule) is schedule
    assert make_schedule(schedule, 2, 2, 1) is schedule
    assert make_schedule(GRID, 2).to_text() == GRID
    assert make_schedule(schedule.table, num_microbatches=2).orders == schedule.orders
    assert make_schedule({0: ["0F0", "0B0"]}).to_text() == "0F0 0B0"


def test_functions():
    assert make_schedule(ScheduleInterleaved1F1B, 4, 4, 2) == ScheduleInterleaved1F1B(4, 4, 2)

    def backwards_first(num_stages, num_microbatches, stages_per_rank):
        assert stages_per_rank == 1
        return Schedule1F1B(num_stages, num_microbatches)

    assert make_schedule(backwards_first, 3, 2) == Schedule1F1B(3, 2)
    with pytest.raises(ValueError, match="`schedule`, a function, must return a `Schedule`. Received: returned='1f1b'"):
        make_schedule(lambda *sizes: "1f1b", 3, 2)
    with pytest.raises(ValueError, match="`schedule` must have `num_stages`=3, but has 2"):
        make_schedule(lambda *sizes: Schedule1F1B(2, 2), 3, 2)


@pytest.mark.parametrize("name", ["num_stages", "num_microbatches", "stages_per_rank"])
@pytest.mark.parametrize("schedule", [Schedule1F1B(2, 2), GRID, Schedule1F1B(2, 2).table])
def test_sizes_that_differ(schedule, name):
    with pytest.raises(ValueError, match=f"`schedule` must have `{name}`=7, but has [12]. Received: schedule=Schedule"):
        make_schedule(schedule, **{name: 7})


@pytest.mark.parametrize("sizes", [(None, 4), (4, None), (None, None)])
def test_sizes_that_are_missing(sizes):
    with pytest.raises(ValueError, match="`num_stages` and `num_microbatches` must be given for a schedule that is yet to be"):
        make_schedule("1f1b", *sizes)


@pytest.mark.parametrize("schedule", ["1f2b", "", "gpipe 1f1b", None, 3, [["0F0", "0B0"]]])
def test_what_is_no_schedule(schedule):
    with pytest.raises(ValueError, match="one of 'gpipe', '1f1b', 'interleaved', 'zero_bubble', the text") as error:
        make_schedule(schedule, 4, 4)
    assert f"Received: schedule={schedule!r}" in str(error.value)


def test_a_grid_with_a_wrong_word_is_still_a_grid():
    with pytest.raises(ValueError, match="`text` must be a stage, .* Received: text='0X0'"):
        make_schedule("0F0 0X0")


def test_what_cannot_run():
    with pytest.raises(ValueError, match="must run 0F0 before 0B0"):
        make_schedule({0: ["0B0", "0F0"]})
    assert isinstance(make_schedule("0F0 0B0"), Schedule)
