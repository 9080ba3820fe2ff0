"""Level 4: what part of a variable each rank stores, and how a parameter is gathered, dropped and gathered again."""

from tfdist.sharding import stage_owners
from tfdist.sharding.config import ShardingConfig, settings_of, with_settings_listed
from tfdist.sharding.layout import Layout
from tfdist.sharding.mesh_config import MeshConfig, config_of
from tfdist.sharding.parameter_group import ParameterGroup, ParameterGroups
from tfdist.sharding.placements import Own, Partial, Placement, Replicate, Shard
from tfdist.sharding.replicated_variables import PartialSyncOnReadVariable, ReplicatedMirroredVariable, with_layout
from tfdist.sharding.stage_owners import current_owners, place
from tfdist.sharding.tensor_cut import cut_over_tensor
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
    "Replicate",
    "ReplicatedMirroredVariable",
    "Shard",
    "ShardedVariable",
    "ShardingConfig",
    "UnshardSchedule",
    "ZeroPlacements",
    "config_of",
    "current_owners",
    "cut_over_tensor",
    "place",
    "placements_of",
    "with_layout",
    "settings_of",
    "stage_owners",
    "with_settings_listed",
]
