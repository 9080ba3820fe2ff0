"""What one worker assigns, and others do not, or not alike, to what all hold: the job ends, with the variable's name."""

import re
import time

import numpy as np
import pytest
from grids import exhaustive

from tests import workers

CASES = "tests.strategy.write_cases"

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(
    ("way", "stage", "words"),
    [
        ("one", 3, "'sequential/dense/kernel' on worker 0 .*and not on worker 1"),
        exhaustive("one", 0, "'sequential/dense/kernel' on worker 0 .*and not on worker 1"),
        exhaustive("each", 0, "'sequential/dense/kernel' on worker .*and another on worker"),
        exhaustive("each", 3, "'sequential/dense/kernel' on worker .*and another on worker"),
        ("rate", 0, "'sgd/learning_rate' on worker 0 .*and not on worker 1"),
        exhaustive("rate", 3, "'sgd/learning_rate' on worker 0 .*and not on worker 1"),
        exhaustive("file", 3, "'sequential/dense/kernel' on worker .*and another on worker"),
        exhaustive("checkpoint", 0, "'Variable' on worker .*and another on worker"),
        exhaustive("function", 0, "'sequential/dense/kernel' on worker 1 .*and not on worker 0"),
        exhaustive("loop", 0, "'Variable' on worker .*and another on worker"),
    ],
)
def test_they_are_refused(tmp_path, way, stage, words):
    each = [{"index": index, "way": way, "stage": stage, "folder": str(tmp_path)} for index in range(2)]
    with workers.job(tmp_path, 2, f"{CASES}:assign", each=each) as job:
        started = time.monotonic()
        codes = job.wait(100)
        assert all(codes) and time.monotonic() - started < 60
        for worker in job.workers:
            assert "Workers have assigned different values, outside of steps, to what all hold: " in worker.output
            assert re.search(words, worker.output) and "strategy.from_chief(value)" in worker.output, worker.output[-3000:]


@pytest.mark.parametrize(
    ("way", "stage", "words"),
    [
        ("model", 3, "Workers run different programs: a lookup table of digest"),
        exhaustive("model", 0, "Workers run different programs: a lookup table of digest"),
        exhaustive("data", 0, "Every worker must be given the same dataset, of which it takes its part, but worker"),
        exhaustive("rows", 0, "'normalization/mean' on worker .*and another on worker"),
        exhaustive("rows", 3, "'normalization/mean' on worker .*and another on worker"),
    ],
)
def test_what_layers_are_adapted_to(tmp_path, way, stage, words):
    each = [{"index": index, "way": way, "stage": stage} for index in range(2)]
    with workers.job(tmp_path, 2, f"{CASES}:adapt", each=each) as job:
        assert all(job.wait(100))
        assert any(re.search(words, worker.output) for worker in job.workers), job.workers[0].output[-3000:]


@pytest.mark.parametrize("stage", [3, exhaustive(0)])
def test_what_all_assign_alike(tmp_path, stage):
    """Also what the error advises: the chief's value on all."""
    with workers.job(tmp_path, 2, f"{CASES}:assign_alike", stage) as job:
        first, second = job.results(150)
        for one, other in zip(first[:-1], second[:-1], strict=True):
            np.testing.assert_array_equal(one, other)
        assert first[-1] == second[-1]
