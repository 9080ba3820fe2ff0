"""Who writes."""

import keras
import pytest
import saved_models
import tensorflow as tf
from two_workers import CHIEF, READER, attach_cluster

from tfdist.checkpoint import all_workers_inside, chief_decides, cluster_strategy_of, is_chief, tfdist_strategy
from tfdist.strategy import ShardedStrategy

pytestmark = pytest.mark.timeout(120)


def made_under(strategy):
    with strategy.scope():
        return saved_models.sequential()


def test_alone_without_a_strategy_of_tfdist(cpus):
    assert tfdist_strategy(saved_models.sequential()) is None
    assert tfdist_strategy(made_under(tf.distribute.MirroredStrategy(cpus[:2]))) is None
    assert is_chief(None)


def test_the_only_worker_writes(cpus):
    strategy = ShardedStrategy(cpus[:2])
    model = made_under(strategy)
    assert tfdist_strategy(model) is strategy and is_chief(strategy)
    strategy.cluster = None
    assert tfdist_strategy(model) is strategy and is_chief(strategy)
    assert cluster_strategy_of(model.variables) is None


@pytest.mark.parametrize(("role", "writes"), [(CHIEF, True), (READER, False)])
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_chief_and_reader(role, writes, zero_stage, cpus):
    strategy = attach_cluster(ShardedStrategy(cpus[:2], zero_stage=zero_stage), role)
    model = made_under(strategy)
    assert is_chief(strategy) is writes
    assert tfdist_strategy(model) is cluster_strategy_of(model.variables) is strategy
    # Put together outside the scope, of layers made inside it.
    part = keras.Model(model.inputs, model.layers[0].output)
    assert part._distribute_strategy is None
    assert tfdist_strategy(part) is strategy
    assert tfdist_strategy(model.layers[0]) is strategy  # Keras saves layers too


def test_objects_without_variables_have_no_strategy():
    assert tfdist_strategy(object()) is None
    assert tfdist_strategy(keras.Sequential()) is None


def test_the_chief_decides():
    chief, reader = tf.distribute.OneDeviceStrategy("CPU:0"), tf.distribute.OneDeviceStrategy("CPU:0")
    for decision in (True, False):
        said = []
        chief.share = lambda name, value, said=said: said.append((name, value)) or value
        reader.share = lambda name, value, said=said: said[0][1]
        assert chief_decides(chief, "question", decision) is decision
        assert chief_decides(reader, "question", not decision) is decision
        assert said[0][0] == "question"


def test_an_error_leaves_a_common_block_at_once():
    calls = []
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    strategy.barrier = calls.append
    with pytest.raises(OSError), all_workers_inside(strategy, "block"):
        raise OSError
    assert calls == ["block/begin"]
    with all_workers_inside(strategy, "block"):
        assert calls == ["block/begin"] * 2
    assert calls == ["block/begin", "block/begin", "block/end"]
