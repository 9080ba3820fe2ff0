"""Functions of the batch on a mesh with tensor ranks, beside one device: see `tests.programs.rows.functions_of_the_batch`."""

import pytest
from grids import exhaustive

from tests.programs.rows.test_functions_of_the_batch import named
from tests.programs.rows.ways_of_training import Case, assert_same
from tests.programs.test_over_workers import all_functions, assert_functions_over_workers

pytestmark = [pytest.mark.as_traced, pytest.mark.timeout(300), pytest.mark.usefixtures("float64")]


@pytest.mark.parametrize(
    ("case", "zero_stage"),
    [
        (Case(("rmse", "dice", "covariance"), "step", "uneven"), 3),
        exhaustive(Case(("gated_by_means", "minus_the_mean"), "layer", "uneven"), 0),
    ],
    ids=named,
)
def test_tensor_ranks(case, zero_stage):
    assert_same(case, zero_stage, 4, tensor_parallel_size=2)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["step", "fit", "loop", "layer", "gradient"])
def test_functions_of_the_batch(tmp_path, way):
    assert_functions_over_workers(tmp_path, all_functions(way), devices=2, tensor_parallel_size=2)
