"""Medians and ratios over rounds, and losses that must agree."""

import math

import pytest
from suite_records import LOSS, speed

from benchmarks.figures import Figures, checked, loss_error


def test_ratios_are_of_the_same_round():
    records = [speed("small", "zero3", 2, own, number) for number, own in enumerate([10.0, 20.0, 90.0])]
    records += [speed("small", "fsdp2", 2, its, number) for number, its in [(0, 10.0), (2, 30.0), (3, 1.0)]]
    found = Figures(records).ratio("small", 2, "zero3", "fsdp2")
    assert (found.low, found.median, found.high) == (1.0, 2.0, 3.0)


def test_a_single_is_that_of_any_number_of_ranks():
    figures = Figures([speed("small", "single", 2, 10.0), speed("small", "zero3", 4, 5.0)])
    assert figures.efficiencies("small", 4, "zero3", "single") == {0: 0.5}


def test_what_failed_or_is_missing_has_no_figures():
    records = [speed("small", "zero3", 2, 10.0, error="died"), speed("small", "fsdp2", 2, 10.0, missing="no torch")]
    figures = Figures(records)
    assert figures.spread("tokens_per_second", "speed", "small", "zero3", 2) is None
    assert figures.ratio("small", 2, "zero3", "fsdp2") is None


@pytest.mark.parametrize(
    ("contender", "difference", "agrees"),
    [
        ("fsdp2", 0.9e-5, True),
        ("fsdp2", 1.2e-5, False),
        ("fsdp2", math.nan, False),
        ("mw-mirrored", 1.2e-5, True),  # its Adam takes an embedding's gradient as rows
        ("mw-mirrored", 1.2e-3, False),
    ],
)
def test_losses_must_agree(contender, difference, agrees):
    reference = speed("small", "zero3", 2, 10.0)
    other = speed("small", contender, 2, 10.0) | {"warmup_losses": [LOSS, LOSS * (1 + difference)]}
    assert loss_error(reference, [reference, other]) is None
    assert (loss_error(other, [reference, other]) is None) == agrees


def test_the_reference_is_one_that_updates_as_all_do():
    first = speed("small", "single", 1, 10.0) | {"warmup_losses": [LOSS * (1 + 5e-4)]}
    others = [speed("small", contender, 2, 10.0) for contender in ("fsdp2", "zero3")]
    assert [record.get("error") for record in checked([first, *others])] == [None, None, None]
    others[1]["warmup_losses"] = [LOSS * (1 + 5e-5)]
    found = checked([first, *others])
    assert ["error" in record for record in found] == [False, False, True]
    assert "fsdp2 x2" in found[2]["error"]


def test_without_an_embedding_all_updates_are_the_same():
    records = [speed("wide", "zero3", 2, 10.0), speed("wide", "mw-mirrored", 2, 10.0) | {"warmup_losses": [LOSS * (1 + 5e-5)]}]
    assert ["error" in record for record in checked(records)] == [False, True]


def test_losses_of_other_work_are_not_compared():
    records = [speed("wide", "zero3", 2, 10.0), speed("small", "zero3", 2, 10.0) | {"warmup_losses": [1.0]}]
    assert checked(records) == records
