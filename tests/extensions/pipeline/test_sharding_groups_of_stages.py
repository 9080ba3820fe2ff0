"""`sharding_group_size` beside the stages of a pipeline: one device's numbers."""

import pytest
from training import one_device

from tests.extensions.pipeline import pipeline_models
from tests.parity.comparison import assert_same_tree
from tests.strategy.test_hybrid_sharding import hybrid

pytestmark = pytest.mark.as_traced


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("zero_stage", range(4))
def test_beside_pipeline_ranks(zero_stage):
    strategy = hybrid(zero_stage, 1, pipeline_parallel_size=2)
    found = pipeline_models.train(strategy, "plain", infers=False, num_microbatches=2)
    assert_same_tree(found, pipeline_models.train(one_device(), "plain", infers=False))
