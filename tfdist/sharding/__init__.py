"""Level 4: what part of a variable each rank stores, and how a parameter is gathered, dropped and gathered again."""

from tfdist.sharding.config import MeshConfig, ShardingConfig, config_of, settings_of, travels_exactly, with_settings_listed
from tfdist.sharding.keras_scope import layers_within
from tfdist.sharding.layout import Layout
from tfdist.sharding.placement_request import PlacementRequest, current_placement, kept_placement, placement, request_placement
from tfdist.sharding.placements import Partial, Replicate, Shard
from tfdist.sharding.replicated_variables import PartialSyncOnReadVariable, ReplicatedMirroredVariable, with_layout
from tfdist.sharding.unshard import UnshardSchedule
from tfdist.sharding.variable import ShardedVariable, read_if_sharded
from tfdist.sharding.weight_cache import WeightCache, sharded_parameters
from tfdist.sharding.zero import ZERO_STAGES, ZeroPlacements, placements_of
