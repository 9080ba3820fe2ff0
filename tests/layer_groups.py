"""Stage 3 as the tests want it: each layer gathered alone.

Models of tests are so small that with the default `group_bytes` all their layers would be gathered at once, and kept: nothing
would be gathered ahead, freed and gathered again. Tests of the default itself pass `group_bytes`.
"""

from __future__ import annotations

import tfdist


def gather_each_layer_alone() -> None:
    """Changes the default of this process's strategies."""
    for strategy in (tfdist.ShardedStrategy, tfdist.MultiWorkerShardedStrategy):
        strategy.__init__.__kwdefaults__["group_bytes"] = 0
