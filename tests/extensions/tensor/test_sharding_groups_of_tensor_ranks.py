"""`sharding_group_size` beside tensor ranks: one device's numbers, and parameters that stay within a group."""

import keras
import pytest
from training import one_device

import tfdist
from tests import workers
from tests.extensions.tensor import tensor_models
from tests.parity.comparison import assert_same_tree
from tests.strategy.test_hybrid_sharding import hybrid

pytestmark = pytest.mark.as_traced


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "zero_stage"), [("tied", 3), ("dense", 1), ("transformer", 0), ("grouped queries, gated", 2)])
def test_beside_tensor_ranks(name, zero_stage):
    found = tensor_models.train(hybrid(zero_stage, 1, tensor_parallel_size=2), name)
    assert_same_tree(found, tensor_models.train(one_device(), name, infers=False))


MODELS_BESIDE_TENSOR_RANKS = [("dense", 1), ("tied", 3)]


def train_groups_of_tensor_ranks():
    """2 groups, each of which shards over 2 data ranks of 2 tensor ranks; returns what training gives, by model and stage."""
    keras.config.set_floatx("float64")
    found = {}
    for name, zero_stage in MODELS_BESIDE_TENSOR_RANKS:
        settings = {"sharding_group_size": 2, "tensor_parallel_size": 2, "ranks_per_host": 4, "check_drift_every": 1}
        strategy = tfdist.MultiWorkerShardedStrategy(zero_stage=zero_stage, **settings)
        found[name, zero_stage] = tensor_models.train(strategy, name)
        assert strategy.mesh.group_ranks("shard", 0) == (0, 2) and strategy.mesh.group_ranks("replicate", 0) == (0, 4)
        crossing = [x.label for x in strategy.last_plan.records[0] if strategy.mesh.spans_hosts(x.ranks)]
        assert crossing and not any("unshard" in label for label in crossing)
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(560)
@pytest.mark.usefixtures("float64")
def test_groups_of_two_beside_tensor_ranks(tmp_path):
    """On 8 devices, of a process that has them: parameters stay within a group, and weights are one device's."""
    target = "tests.extensions.tensor.test_sharding_groups_of_tensor_ranks:train_groups_of_tensor_ranks"
    with workers.job(tmp_path, 1, target, devices_per_worker=8) as job:
        expected = {key: tensor_models.train(one_device(), key[0]) for key in MODELS_BESIDE_TENSOR_RANKS}
        for found in job.results(540):
            for key, result in found.items():
                assert_same_tree(result, expected[key], str(key))
