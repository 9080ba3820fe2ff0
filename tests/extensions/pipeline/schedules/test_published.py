"""The schedules of the literature: legal at every size, and exactly as idle and as large as their papers say."""

import inspect
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.extensions.pipeline import (
    Phase,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZeroBubble,
    simulate,
    validate,
)

RANKS, MICROBATCHES = st.integers(1, 6), st.integers(1, 12)
STAGES = st.integers(2, 3)  # of a rank
ONE_STAGE = [ScheduleGPipe, Schedule1F1B, ScheduleZeroBubble]
ALL = [*ONE_STAGE, ScheduleInterleaved1F1B]


def peaks(schedule):
    simulation = simulate(schedule)
    return [simulation.peak_in_flight(rank) for rank in range(schedule.num_ranks)]


@pytest.mark.parametrize("make", ALL)
@given(RANKS, MICROBATCHES, STAGES)
def test_every_size_is_legal(make, num_ranks, num_microbatches, stages_per_rank):
    stages_per_rank = 1 if make in ONE_STAGE else stages_per_rank
    schedule = make(num_ranks * stages_per_rank, num_microbatches, stages_per_rank)
    sizes = (schedule.num_ranks, schedule.num_microbatches, schedule.stages_per_rank)
    assert sizes == (num_ranks, num_microbatches, stages_per_rank)
    validate(schedule)
    for rank, stage_index in itertools.product(range(num_ranks), range(schedule.num_stages)):
        of_stage = [action for action in schedule.actions(rank) if action.stage_index == stage_index]
        for phase in {action.phase for action in of_stage}:
            order = [action.microbatch for action in of_stage if action.phase is phase]
            assert order == list(range(num_microbatches)), "microbatches keep their order on every stage"


@given(RANKS, MICROBATCHES)
def test_gpipe(num_ranks, num_microbatches):
    schedule = ScheduleGPipe(num_ranks, num_microbatches)
    assert simulate(schedule).bubble_fraction == (num_ranks - 1) / num_microbatches
    assert peaks(schedule) == [num_microbatches] * num_ranks
    for rank in range(num_ranks):
        phases = [action.phase for action in schedule.actions(rank)]
        assert phases == [Phase.FORWARD] * num_microbatches + [Phase.BACKWARD] * num_microbatches


@given(RANKS, MICROBATCHES, STAGES)
def test_gpipe_of_several_stages_per_rank(num_ranks, more, stages_per_rank):
    num_microbatches = num_ranks + more - 1
    schedule = ScheduleGPipe(num_ranks * stages_per_rank, num_microbatches, stages_per_rank)
    assert simulate(schedule).bubble_fraction == (num_ranks - 1) / (stages_per_rank * num_microbatches)
    assert peaks(schedule) == [stages_per_rank * num_microbatches] * num_ranks


@given(RANKS, MICROBATCHES)
def test_1f1b(num_ranks, num_microbatches):
    schedule = Schedule1F1B(num_ranks, num_microbatches)
    assert simulate(schedule).bubble_fraction == (num_ranks - 1) / num_microbatches
    assert peaks(schedule) == [min(num_microbatches, num_ranks - rank) for rank in range(num_ranks)]
    last = schedule.actions(num_ranks - 1)
    assert [action.phase for action in last] == [Phase.FORWARD, Phase.BACKWARD] * num_microbatches


@given(RANKS, MICROBATCHES, STAGES)
def test_interleaved(num_ranks, rounds, stages_per_rank):
    """Megatron's warmup bounds what is held; the first rank's is p v (1 + (p - 1) / (p v)), in activations of a stage."""
    num_microbatches = num_ranks * (1 + rounds % 3)
    schedule = ScheduleInterleaved1F1B(num_ranks * stages_per_rank, num_microbatches, stages_per_rank)
    assert simulate(schedule).bubble_fraction == (num_ranks - 1) / (stages_per_rank * num_microbatches)
    bound = [(stages_per_rank - 1) * num_ranks + 2 * (num_ranks - 1 - rank) + 1 for rank in range(num_ranks)]
    assert bound[0] == pytest.approx(num_ranks * stages_per_rank * (1 + (num_ranks - 1) / (num_ranks * stages_per_rank)))
    assert peaks(schedule) == [min(stages_per_rank * num_microbatches, most) for most in bound]
    assert simulate(schedule).peak_microbatches(0) == peaks(schedule)[0] / stages_per_rank


@given(RANKS, MICROBATCHES, STAGES)
def test_interleaved_with_any_number_of_microbatches(num_ranks, more, stages_per_rank):
    num_microbatches = num_ranks + more - 1
    schedule = ScheduleInterleaved1F1B(num_ranks * stages_per_rank, num_microbatches, stages_per_rank)
    assert simulate(schedule).bubble_fraction == (num_ranks - 1) / (stages_per_rank * num_microbatches)
    group = -(-num_microbatches // (num_microbatches // num_ranks))
    bound = [(stages_per_rank - 1) * group + 2 * (num_ranks - 1 - rank) + 1 for rank in range(num_ranks)]
    assert peaks(schedule) == [min(stages_per_rank * num_microbatches, most) for most in bound]


DURATION = st.integers(1, 9)


@given(RANKS, MICROBATCHES, DURATION, DURATION, DURATION)
def test_zero_bubble(num_ranks, more, forward, backward_input, backward_weight):
    """ZB-H1 idles (p - 1) (F + I - W), a third of 1F1B's where the three are equal, and holds p microbatches at most."""
    num_microbatches = num_ranks + more - 1
    schedule = ScheduleZeroBubble(num_ranks, num_microbatches)
    assert simulate(schedule).bubble_fraction == (num_ranks - 1) / (3 * num_microbatches)
    weight = min(forward, backward_input, backward_weight)
    durations = {Phase.FORWARD: forward, Phase.BACKWARD_INPUT: backward_input, Phase.BACKWARD_WEIGHT: weight}
    busy = num_microbatches * (forward + backward_input + weight)
    idle = (num_ranks - 1) * (forward + backward_input - weight)
    assert simulate(schedule, durations).total_time == busy + idle
    assert peaks(schedule) == [num_ranks] * num_ranks


@given(RANKS, MICROBATCHES)
def test_zero_bubble_is_1f1b_with_split_backwards(num_ranks, num_microbatches):
    split, whole = ScheduleZeroBubble(num_ranks, num_microbatches), Schedule1F1B(num_ranks, num_microbatches)
    letters = {Phase.FORWARD: Phase.FORWARD, Phase.BACKWARD: Phase.BACKWARD_INPUT}
    for rank in range(num_ranks):
        order = [action for action in split.actions(rank) if action.phase is not Phase.BACKWARD_WEIGHT]
        expected = [(letters[action.phase], action.microbatch) for action in whole.actions(rank)]
        assert [(action.phase, action.microbatch) for action in order] == expected
    assert max(peaks(split)) <= min(num_ranks, num_microbatches) == max(peaks(whole))


@pytest.mark.parametrize("make", ALL)
def test_the_grid_of_the_docstring(make):
    sizes = (4, 4, 2) if make is ScheduleInterleaved1F1B else (3, 4)
    grid = "\n".join(f"    {line}" for line in make(*sizes).to_text().splitlines())
    assert f"\n{grid}\n" in inspect.getdoc(make)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("name", ["num_stages", "num_microbatches", "stages_per_rank"])
def test_sizes_are_positive_integers(make, name):
    for value in (0, -1, 2.0, True, "2", None):
        sizes = {"num_stages": 4, "num_microbatches": 4, "stages_per_rank": 2, name: value}
        with pytest.raises(ValueError, match=f"`{name}` must be a positive integer. Received: {name}={value!r}"):
            make(**sizes)


def test_stages_are_divided_by_the_ranks():
    with pytest.raises(ValueError, match="multiple of `stages_per_rank`, but 2 does not divide 5") as error:
        ScheduleInterleaved1F1B(5, 4, 2)
    assert "Received: num_stages=5, stages_per_rank=2. Numbers that work: 4, 6." in str(error.value)


@pytest.mark.parametrize("make", [Schedule1F1B, ScheduleZeroBubble])
def test_one_stage_per_rank(make):
    with pytest.raises(ValueError, match=f"`stages_per_rank` of `{make.__name__}` must be 1. Rec") as error:
        make(4, 4, 2)
    assert "eived: stages_per_rank=2. `ScheduleInterleaved1F1B` and `ScheduleGPipe` take several." in str(error.value)


def test_several_stages_per_rank():
    with pytest.raises(ValueError, match="`ScheduleInterleaved1F1B` must be at least 2. Received: stages_per_rank=1"):
        ScheduleInterleaved1F1B(4, 4, 1)
