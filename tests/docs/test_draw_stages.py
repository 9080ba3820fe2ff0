"""The picture of the stages shows the messages of a step in the order in which a traced step sends them."""

import pytest
from drawing import script


@pytest.fixture(scope="module")
def draw_stages():
    return script("draw_stages")


def label(task, zero_stage, layers):
    """Returns the label of a task's message in the plan: buckets are numbered as backward fills them."""
    words = {"AR": "all_reduce", "RS": "reduce_scatter", "AG": "unshard" if zero_stage == 3 else "all_gather"}
    place = f"layer_{task.layer}" if zero_stage == 3 else f"bucket_{layers - 1 - task.layer}"
    return f"{words[task.kind]}/{place}" + ("/backward" if task.again else "")


@pytest.mark.parametrize("zero_stage", range(4))
def test_messages_are_in_the_order_of_a_traced_step(draw_stages, zero_stage):
    drawn = [label(task, zero_stage, draw_stages.LAYERS) for task in draw_stages.STEPS[zero_stage].messages]
    plan, _ = script("draw_design").plan_of(zero_stage)
    assert drawn == [record.label for record in plan.records[0]]


def test_lanes_do_not_overlap(draw_stages):
    for step in draw_stages.STEPS:
        begins = draw_stages.times(step)
        for lane in (step.computation, step.messages):
            assert len({task.name for task in lane}) == len(lane)
            for before, after in zip(lane, lane[1:], strict=False):
                assert begins[before.name] + draw_stages.DURATIONS[before.kind] <= begins[after.name]


def test_it_is_drawn(draw_stages, tmp_path):
    draw_stages.draw(tmp_path / "stages.png")
    assert (tmp_path / "stages.png").stat().st_size > 10_000
