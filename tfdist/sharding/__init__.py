"""Level 4: what part of a variable each rank stores, and how a parameter is gathered, dropped and gathered again."""

from tfdist.sharding import stage_owners
from tfdist.sharding.config import ShardingConfig, settings_of, with_settings_listed
from tfdist.sharding.layout import Layout
from tfdist.sharding.mesh_config import MeshConfig, config_of
from tfdist.sharding.parameter_group import ParameterGroup, ParameterGroups
from tfdist.sharding.placement_request import (
    PlacementRequest,
    current_placement,
    keep_placement,
    kept_placement,
    make_again,
    placement,
)
from tfdist.sharding.placements import Own, Partial, Placement, Replicate, Shard
from tfdist.sharding.replicated_variables import PartialSyncOnReadVariable, ReplicatedMirroredVariable, with_layout
from tfdist.sharding.shard_over_tensor import shard_over_tensor
from tfdist.sharding.stage_owners import place
from tfdist.sharding.unshard import UnshardSchedule
from tfdist.sharding.variable import ShardedVariable
from tfdist.sharding.zero import ZERO_STAGES, ZeroPlacements, placements_of

__all__ = [
    "ZERO_STAGES",
    "Layout",
    "MeshConfig",
    "Own",
    "ParameterGroup",
    "ParameterGroups",
    "Partial",
    "PartialSyncOnReadVariable",
    "Placement",
    "PlacementRequest",
    "Replicate",
    "ReplicatedMirroredVariable",
    "Shard",
    "ShardedVariable",
    "ShardingConfig",
    "UnshardSchedule",
    "ZeroPlacements",
    "config_of",
    "current_placement",
    "keep_placement",
    "kept_placement",
    "make_again",
    "place",
    "placement",
    "placements_of",
    "shard_over_tensor",
    "with_layout",
    "settings_of",
    "stage_owners",
    "with_settings_listed",
]
