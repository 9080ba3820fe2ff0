"""What the strategies share: their settings, and what a user can ask them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import CollectivePlan
from tfdist.mesh import DeviceMesh
from tfdist.sharding import ShardingConfig


def sharding_config(
    devices: Sequence[str], *, tensor_parallel_size: int, pipeline_parallel_size: int, **settings: Any
) -> ShardingConfig:
    """Returns the checked settings of a strategy over `devices`, one rank each.

    Raises:
        ValueError: a setting is out of range, or the sizes do not divide the number of devices.
    """
    mesh = DeviceMesh(tuple(devices), pipeline_parallel_size=pipeline_parallel_size, tensor_parallel_size=tensor_parallel_size)
    return ShardingConfig(mesh=mesh, **settings)


class ShardedStrategyMixin:
    """The part of a tfdist strategy that does not depend on where its devices are."""

    _sharding_config: ShardingConfig
    extended: tf.distribute.StrategyExtended

    @property
    def sharding_config(self) -> ShardingConfig:
        """The strategy's settings."""
        return self._sharding_config

    @property
    def mesh(self) -> DeviceMesh:
        """The devices as a mesh (data, pipe, tensor)."""
        return self._sharding_config.mesh

    @property
    def zero_stage(self) -> int:
        return self._sharding_config.zero_stage

    @property
    def last_plan(self) -> CollectivePlan | None:
        """The collectives of the step that was traced last, per rank; None before the first."""
        return self.extended.last_plan
