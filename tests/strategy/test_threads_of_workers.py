"""Threads of several workers: their order is the same on all, or they are refused."""

import time

import numpy as np
import pytest
from grids import exhaustive

from tests import workers

CASES = "tests.strategy.thread_cases"

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("stage", [3, exhaustive(0)])
def test_threads_that_hand_over(tmp_path, stage):
    with workers.job(tmp_path, 2, f"{CASES}:hand_over", stage) as job:
        for alone, together in job.results(150):
            for one, other in zip(alone, together, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("ways", "words"),
    [
        (["beside"] * 2, "Threads must take turns in one order on all workers, but worker "),
        (["", "late"], "Threads must take turns in one order on all workers, but worker "),
        exhaustive(["late", ""], "Threads must take turns in one order on all workers, but worker "),
    ],
)
def test_threads_that_do_not(tmp_path, ways, words):
    each = [{"way": way, "stage": 0} for way in ways]
    with workers.job(tmp_path, 2, f"{CASES}:run_apart", each=each) as job:
        job.workers[0].wait_for("acting", 120)
        started = time.monotonic()
        codes = job.wait(60)
        assert time.monotonic() - started < 40 and all(codes)
        for worker in job.workers:
            assert words in worker.output, worker.output[-3000:]
