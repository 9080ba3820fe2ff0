"""What a strategy tells the levels below about sharding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist.mesh import DeviceMesh
from tfdist.sharding.config import ShardingConfig
from tfdist.sharding.layout import Layout
from tfdist.sharding.zero import ZeroPlacements, placements_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(ShardingConfig):
    """The settings of one strategy together with the mesh of its devices, and what follows from both.

    Attributes:
        mesh: the devices of all workers, one rank each.
    """

    mesh: DeviceMesh

    @classmethod
    def over(cls, devices: Sequence[str], config: ShardingConfig) -> MeshConfig:
        """Returns the settings `config` on the mesh of `devices`. Raises ValueError when its sizes do not divide their number."""
        sizes = {name: getattr(config, name) for name in ("pipeline_parallel_size", "tensor_parallel_size")}
        return cls(mesh=DeviceMesh(tuple(devices), **sizes), **config.settings())

    @property
    def placements(self) -> ZeroPlacements:
        return placements_of(self.zero_stage)

    def travel_dtype(self, dtype: tf.DType) -> tf.DType:
        """Returns the dtype in which gradients of `dtype` are sent."""
        return self.reduce_dtype or dtype

    def slot_layout(self, parameter: Layout) -> Layout:
        """Returns the layout of an optimizer slot of `parameter`: sharded as it, and flat over data where the stage says so."""
        return dataclasses.replace(parameter, data=self.placements.optimizer_state)


def config_of(strategy: tf.distribute.Strategy) -> MeshConfig | None:
    """Returns the settings and the mesh of a tfdist strategy, None for every other strategy."""
    return getattr(strategy, "sharding_config", None)
