"""The settings of a strategy: each stands once, in `ShardingConfig`, and both strategies take it from there."""

import dataclasses
import inspect

import pytest
import tensorflow as tf

import tfdist
from tests.devices import names
from tfdist.sharding import MeshConfig, PlacementRequest
from tfdist.sharding.config import settings_of

STRATEGIES = (tfdist.ShardedStrategy, tfdist.MultiWorkerShardedStrategy)
FIELDS = dataclasses.fields(tfdist.ShardingConfig)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_shows_every_setting(strategy):
    """What `help` and an editor show: names, defaults, types and descriptions."""
    parameters = inspect.signature(strategy.__init__).parameters
    assert not [name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    for field in FIELDS:
        shown = parameters[field.name]
        assert (shown.default, shown.annotation, shown.kind) == (field.default, field.type, inspect.Parameter.KEYWORD_ONLY)
        described = f"    {field.name}: {field.metadata['about']}"
        for text in (strategy.__doc__, tfdist.ShardingConfig.__doc__):
            assert " ".join(described.split()) in " ".join(text.split())


def test_settings_by_name_in_one_object_and_both():
    config = tfdist.ShardingConfig(zero_stage=3, prefetch=2, reduce_dtype="float64")
    assert config.reduce_dtype is tf.float64
    for strategy in STRATEGIES:
        assert strategy(config=config).sharding_config.settings() == config.settings()
        both = strategy(config=config, zero_stage=1, tensor_parallel_size=2)
        assert both.sharding_config.settings() == {**config.settings(), "zero_stage": 1, "tensor_parallel_size": 2}
        assert both.mesh.shape == (2, 1, 2)
        assert strategy(**config.settings()).sharding_config == strategy(config=config).sharding_config
        assert strategy().sharding_config.settings() == tfdist.ShardingConfig().settings()


def test_a_strategys_own_settings_serve_another():
    strategy = tfdist.ShardedStrategy(zero_stage=3, tensor_parallel_size=2)
    again = tfdist.ShardedStrategy(names(2), config=strategy.sharding_config)
    assert again.mesh.shape == (1, 1, 2)
    assert again.zero_stage == 3


def test_settings_are_checked_when_they_are_given_and_do_not_change():
    with pytest.raises(ValueError, match="`group_bytes` must be an integer of at least 0.*group_bytes=-1"):
        tfdist.ShardingConfig(group_bytes=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tfdist.ShardingConfig().zero_stage = 3
    with pytest.raises(ValueError, match="`zero_stage`"):
        dataclasses.replace(tfdist.ShardingConfig(), zero_stage=4)


def test_names_that_are_no_settings():
    with pytest.raises(TypeError, match="`zero_stag` is no setting.*zero_stag=3.*Did you mean `zero_stage`"):
        settings_of(None, {"zero_stag": 3})
    with pytest.raises(TypeError, match="`anything` is no setting.*The settings are bucket_bytes, .*zero_stage"):
        tfdist.MultiWorkerShardedStrategy(anything=3)


def test_layouts_follow_from_settings_and_mesh():
    config = MeshConfig.over([f"/device:CPU:{index}" for index in range(4)], tfdist.ShardingConfig(zero_stage=3))
    layout = PlacementRequest().layout(tf.TensorSpec([8, 3]), True, config)
    assert layout.mesh is config.mesh
    assert layout.shard_elements == 6
    assert config.slot_layout(layout) == layout
