"""Stage 3 as the tests want it: each layer gathered alone.

Models of tests are so small that with the default `group_bytes` all their layers would be gathered at once, and kept: nothing
would be gathered ahead, freed and gathered again. Tests of groups pass a `group_bytes` that is not the default.
"""

from __future__ import annotations

from tfdist.sharding import ShardingConfig
from tfdist.sharding.parameter_group import ParameterGroups


def gather_each_layer_alone() -> None:
    """Makes this process's strategies take the default `group_bytes` for 0; their signatures stay as they are."""
    original = ParameterGroups.__init__

    def init(self: ParameterGroups, group_bytes: int) -> None:
        original(self, 0 if group_bytes == ShardingConfig.group_bytes else group_bytes)

    ParameterGroups.__init__ = init
