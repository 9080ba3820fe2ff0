"""What actions wait for, and what ranks hold."""

import pytest

from tfdist.extensions.pipeline import Action, Phase
from tfdist.extensions.pipeline.schedules.dataflow import earliest_starts, held_activations, inputs_of
from tfdist.extensions.pipeline.schedules.simulation import DURATIONS


def actions(text):
    return [Action.parse(word) for word in text.split()]


@pytest.mark.parametrize(
    ("action", "needed"),
    [
        ("0F3", ""),
        ("1F3", "0F3"),
        ("2B3", "2F3"),
        ("1B3", "1F3 2B3"),
        ("1I3", "1F3 2B3"),
        ("0B3", "0F3 1I3"),
        ("1W3", "1I3"),
    ],
)
def test_inputs(action, needed):
    there = set(actions("0F3 1F3 2F3 2B3 1I3 1W3 0B3 0F0 1F0 2F0 2B0 1B0 0B0"))
    assert inputs_of(Action.parse(action), there) == actions(needed)


def test_starts():
    orders = {0: actions("0F0 0F1 0B0 0B1"), 1: actions("1F0 1B0 1F1 1B1")}
    starts = earliest_starts(orders)
    assert {str(action): start for action, start in starts.items()} == {
        "0F0": 0, "0F1": 1, "1F0": 1, "1B0": 2, "1F1": 3, "1B1": 4, "0B0": 3, "0B1": 5,
    }  # fmt: skip
    # With a transfer of 3: 1F0 at 1 + 3, 1B0 at 5, 0B0 at 7 + 3, 1F1 at 7, 1B1 at 8, 0B1 at 10 + 3.
    starts = earliest_starts(orders, DURATIONS, transfer=3)
    assert {str(action): start for action, start in starts.items()} == {
        "0F0": 0, "0F1": 1, "1F0": 4, "1B0": 5, "1F1": 7, "1B1": 8, "0B0": 10, "0B1": 13,
    }  # fmt: skip


def test_actions_behind_a_circle_are_missing():
    orders = {0: actions("0F0 0B0 0F1 0B1"), 1: actions("1F1 1F0 1B0 1B1")}
    assert set(earliest_starts(orders)) == set(actions("0F0"))


def test_held_activations():
    order = actions("0F0 0F1 0B0 2F1 0I1 2B1 0W1 0F2")
    assert held_activations(order) == [1, 2, 2, 2, 2, 2, 1, 1]
    assert {action.phase for action in order} == set(Phase)
