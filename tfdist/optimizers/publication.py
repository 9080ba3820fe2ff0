"""How the shards that the ranks have updated reach the copies that all of them compute with (stages 1 and 2)."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.optimizers.ownership import owner_of
from tfdist.optimizers.support import is_wrapper
from tfdist.optimizers.target import Target, variable_of
from tfdist.sharding import MeshConfig
from tfdist.sharding.exact_shards import gather_differences, keep_exact_shards
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
    return gather_differences(program, updated, [target.variable for target in targets], label, config)[-1]


def keep_exact_shards_of(optimizer: Any, variables: Sequence[Any], config: MeshConfig) -> None:
    """Lets the ranks update exact shards of those of `variables` whose copies are to be rounded, from the first step on.

    What `optimizer` steps on as a whole travels exactly, and so does what has a constraint: it may look at whole copies, and what
    it makes of them is what counts.
    """
    for variable in () if is_wrapper(optimizer) else variables:
        if owner_of(optimizer, variable) is None and getattr(variable, "constraint", None) is None:
            keep_exact_shards(variable_of(variable), config)
