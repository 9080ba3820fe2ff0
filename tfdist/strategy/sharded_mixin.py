"""What the strategies share: their settings, and what a user can ask them."""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives import CollectivePlan
from tfdist.mesh import DeviceMesh
from tfdist.sharding import MeshConfig


class ShardedStrategyMixin:
    """The part of a tfdist strategy that does not depend on where its devices are."""

    _sharding_config: MeshConfig
    extended: tf.distribute.StrategyExtended

    @property
    def sharding_config(self) -> MeshConfig:
        """The settings, a `tfdist.ShardingConfig`, with the mesh of the devices."""
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
