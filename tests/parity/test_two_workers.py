"""Several steps per execution, metrics after every batch, and eager steps, over two workers."""

import pytest
from grids import exhaustive
from training import one_device

from tests import workers
from tests.parity import worker_cases
from tests.parity.comparison import assert_same_tree

pytestmark = pytest.mark.as_traced

NAMES = ["stage 3", "stage 3, eagerly", "own step, stage 1", "own step, stage 3, eagerly"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("names", [NAMES, exhaustive(list(worker_cases.CASES))], ids=len)
def test_training_is_that_of_one_device(names, tmp_path):
    with workers.job(tmp_path, 2, "tests.parity.worker_cases:train_all", names) as job:
        expected, of_own_step = worker_cases.train_one(one_device()), worker_cases.train_own_step(one_device())
        for found in job.results(180):
            assert list(found) == names
            for case, numbers in found.items():
                of_case = of_own_step if case.startswith("own step") else expected
                assert_same_tree(numbers, {name: of_case[name] for name in numbers}, case)
            assert list(found["stage 3"]) == list(found["stage 3, eagerly"]) == list(expected)
