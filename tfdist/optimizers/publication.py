"""How the shards that the ranks have updated reach the copies that all of them compute with (stages 1 and 2)."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.optimizers.target import Target
from tfdist.sharding import MeshConfig
from tfdist.sharding.compression import COMPRESSION
from tfdist.sharding.shard_messages import gather_shards


def publish(
    targets: Sequence[Target], shards: Sequence[tf.Tensor | None], label: str, config: MeshConfig, program: RankProgram
) -> Any:
    """Brings the copies of `targets` up to date, in one message; returns the operation that writes the last of them.

    Args:
        shards: what the rank has updated; None for what it has updated in its exact shard.
    """
    if all(target.exact is None for target in targets):
        wholes = gather_shards(program, shards, [target.state_layout for target in targets], label)
        return [target.stored.assign(whole, read_value=False) for target, whole in zip(targets, wholes, strict=True)][-1]
    updated = [shard if target.exact is None else target.exact.value() for target, shard in zip(targets, shards, strict=True)]
    return COMPRESSION.now.gather_differences(program, updated, [target.variable for target in targets], label, config)[-1]
