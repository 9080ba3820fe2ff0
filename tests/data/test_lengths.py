"""Data whose length differs between workers: parts of their own count every row, what should be the same everywhere raises."""

import re

import pytest
from grids import exhaustive

from tests import training, workers
from tests.data import length_cases
from tests.strategy.test_multi_worker import assert_equal_trees

CASES = "tests.data.length_cases"
# How many batches the second worker has had when it has no more and the first has; or what is said otherwise.
WAYS = {
    "fit": 3,
    "the second epoch": 3,
    "generator": 3,
    "steps": 3,
    "several steps": 3,
    "evaluate": 3,
    "predict": 3,
    "several predictions": 3,
    "validation": 3,
    "empty": 0,
    "sequence": r"ValueError: .*the number of batches of the data is 5 on worker 0 \(.*\) and 3 on worker 1 \(",
    "steps_per_epoch": r"ValueError: .*the number of steps is 3 on worker 0 \(.*\) and 2 on worker 1 \(",
    "loop": 3,
    "next": 3,
    "in a graph": r"(?s)InvalidArgumentError: .*\[The data have ended early on worker 1 \(.*\), after 3 batches: worker 0 ",
}
# The others end as one of these does.
IN_EVERY_RUN = (
    "fit",
    "the second epoch",
    "several steps",
    "evaluate",
    "predict",
    "validation",
    "sequence",
    "steps_per_epoch",
    "loop",
    "in a graph",
)
FEW = {way: WAYS[way] for way in IN_EVERY_RUN}
FIT = {"asked": ["fit"]}
ALL = {"asked": ["fit", "evaluate", "predict"]}
MOST = [
    {"parts": "4 and 5", "zero_stage": 0, "weighted": True, **FIT},
    {"parts": "5 and 4", "known": (1,), "weighted": True, "steps_per_execution": 2, **FIT},
    {"parts": "one is empty", "asked": ["evaluate"]},
    {"parts": "one is empty", "sequences": True, **FIT},
    {"parts": "4 and 5", "sequences": True, "known": (), "zero_stage": 0, **FIT},
    {
        "parts": "of full batches",
        "class_weight": {label: 0.2 * label + 0.1 for label in range(training.CLASSES)},
        "zero_stage": 0,
        **FIT,
    },
]
EVERY = [
    {"parts": name, "known": known, "zero_stage": stage, "steps_per_execution": steps, "weighted": steps > 1, **ALL}
    for name in ("5 and 4", "4 and 5", "one is empty", "of full batches")
    for known in ((0, 1, 2), (0,), ())
    for stage, steps in ((0, 3), (3, 1), (3, 2))
]


def expected_of(case, pipelines, devices):
    """One device on the rows that the job has in each step."""

    def data(name, *, weighted):
        batches, sequences = length_cases.global_batches(name, pipelines, devices), case.get("sequences", False)
        return length_cases.dataset_of(batches, weighted=weighted, known=True, sequences=sequences)

    return length_cases.ask(training.one_device(), data, case)


@pytest.mark.timeout(300)
@pytest.mark.as_traced
@pytest.mark.parametrize(
    ("number", "devices", "cases"),
    [
        (2, 1, MOST),
        exhaustive(2, 2, [{"parts": "5 and 4", **ALL}]),
        *(
            exhaustive(number, devices, part)
            for number, devices in ((2, 2), (3, 1), (2, 1))
            for part in (EVERY[place::4] for place in range(4))  # a job of eighteen took over 280 s on a busy machine
        ),
    ],
)
def test_parts_of_different_length_count_every_row(tmp_path, number, devices, cases):
    with workers.job(tmp_path, number, f"{CASES}:train_parts", cases, devices_per_worker=devices) as job:
        expected = [expected_of(case, number, devices) for case in cases]
        for found in job.results(280):
            for case, one, other in zip(cases, found, expected, strict=True):
                assert_equal_trees(one, other, str(case))


@pytest.mark.timeout(200)
@pytest.mark.as_traced
@pytest.mark.parametrize(("devices", "zero_stage", "ways"), [(1, 3, FEW), exhaustive(1, 3, WAYS), exhaustive(2, 0, WAYS)])
def test_what_should_be_the_same_everywhere_ends_the_job_when_it_is_not(tmp_path, devices, zero_stage, ways):
    """On every worker, which goes on to the next case: nobody waits, and nobody is a step ahead."""
    with workers.job(tmp_path, 2, f"{CASES}:run_out", ways, zero_stage, devices_per_worker=devices) as job:
        results = job.results(180)
    for found in results:
        assert list(found) == [*ways, "afterwards"]
        for way, expected in ways.items():
            early = rf"RuntimeError: The data have ended early on worker 1 \(.*\), after {expected} batches: worker 0 \(.*\) has"
            assert re.match(expected if isinstance(expected, str) else early, found[way]), (way, found[way])
    assert results[0]["afterwards"] == results[1]["afterwards"]
