"""Which plan is best once dry runs have spoken, and what is told of them."""

import dataclasses
import json

from test_plans import GB, plans

from tfdist.tools.planning.device_memory import DeviceMemory
from tfdist.tools.planning.dry_run import DryRun
from tfdist.tools.planning.search import with_best_confirmed


def confirmed(answers, limit=250):
    """Returns plans of which each dry run gives the next of `answers`, and the names of those that were run."""
    found, names, left = plans(limit), [], iter(answers)

    def run(candidate, of_a_device):
        assert of_a_device == limit * GB
        names.append(candidate.name())
        return next(left)

    told = []
    best_first = with_best_confirmed(found.candidates, run, told.append)
    assert told == [f"confirming {name} by a dry run" for name in names]
    return dataclasses.replace(found, candidates=best_first), names


def dry(gigabytes, sent=(8.0,), **changes):
    memory = DeviceMemory(100 * GB, 0, 0, (gigabytes - 100) * GB)
    return DryRun(memory, **{"sent_bytes": sent, "passed_bytes": (0.0,), "planned_bytes": (8.0,), **changes})


def test_the_best_plan_holds():
    found, names = confirmed([dry(240)])
    assert names == [found.best.candidate.name()] == ["zero 2"]
    assert "Confirmed by a dry run: memory 240.00 GB (planned 250.00 GB), sent bytes equal (8 B a step)." in str(found)
    assert json.loads(json.dumps(found.to_json()))["best"]["dry_run"]["memory"]["together"] == 240 * GB
    found, _ = confirmed([dry(240, sent=(10.0,), is_lower_bound=True)])
    assert "memory at least 240.00 GB (planned 250.00 GB), sent bytes 10 B a step (planned 8 B, +2 bytes)." in str(found)


def test_the_next_best_takes_the_place_of_one_that_does_not_fit():
    found, names = confirmed([dry(260), dry(120, refusal="No."), dry(130)])
    assert names[0] == "zero 2" and len(names) == 3 and found.best.candidate.name() == names[2]
    text = str(found)
    refuted = "a dry run finds 260.00 GB (planned 250.00 GB), 10.00 GB too much, most of it activations."
    assert f"zero 2 would fit by its arithmetic, but {refuted}" in text
    assert f"{names[1]} would fit by its arithmetic, but its strategy refuses it: No." in text
    assert "Confirmed by a dry run: memory 130.00 GB" in text


def test_a_dry_run_that_fails_says_nothing():
    found, names = confirmed([dry(900, failure="TypeError: no model.")])
    assert names == ["zero 2"] == [found.best.candidate.name()] and found.best.device_memory.together == 250 * GB
    assert "Not confirmed: the dry run has failed, which says nothing of the plan. TypeError: no model." in str(found)


def test_not_more_than_a_few_are_tried():
    found, names = confirmed([dry(300)] * 4, limit=300.0)
    assert len(names) <= 4


def test_nothing_is_said_to_be_confirmed_that_is_not():
    assert "Not confirmed by a dry run: `dry_run=True`" in str(plans(250))
