"""Functions of the batch as losses and metrics of pipelines: see `tests.programs.rows.functions_of_the_batch`."""

import pytest

from tests.programs.rows.test_functions_of_the_batch import named
from tests.programs.rows.ways_of_training import PIPELINES, Case, assert_same
from tests.programs.test_over_workers import all_functions, assert_functions_over_workers

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300), pytest.mark.usefixtures("float64")]

LOSSES = ("rmse", "dice", "max_of_the_rows", "standardised_rows", "in_batch_negatives", "slope_by_a_factor")
CASES = [
    (Case(LOSSES, "pipeline", "uneven"), 3, 4),
    (Case(("mean", "covariance", "cond_of_the_mean", "logsumexp_of_tasks", "sorted_rows"), "pipeline", "even"), 1, 2),
    (Case(("masked_mean", "correlation", "where_of_the_mean"), "pipeline_metric", "uneven"), 0, 4),
]


@pytest.mark.parametrize(("case", "zero_stage", "devices"), CASES, ids=named)
def test_it_is_one_device(case, zero_stage, devices):
    assert_same(case, zero_stage, devices)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", PIPELINES)
def test_functions_of_the_batch(tmp_path, way):
    assert_functions_over_workers(tmp_path, all_functions(way), devices=2)
