"""Constraints of weights (`kernel_constraint=...`), applied after the step as Keras does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.optimizers.target import Target
from tfdist.sharding import MeshConfig
from tfdist.sharding.shard_messages import gather_over_tensor, gather_shards_in_buckets

# These look at one element at a time, and so may look at a shard.
_ELEMENTWISE = (keras.constraints.NonNeg,)


def constrain(variables: Sequence[Any], config: MeshConfig, program: RankProgram) -> None:
    """Applies to each of `variables` its constraint, if it has one.

    A replicated weight (stages 0 to 2) is whole on every rank and needs no message. A sharded one (stage 3, or over the tensor
    axis) is gathered for it, since a constraint may take the norm of a row, unless it is known to be elementwise.
    """
    gathered = []
    for variable in variables:
        constraint = getattr(variable, "constraint", None)
        if constraint is None:
            continue
        target = Target.of(variable, config, program)
        if target.layout.is_sharded and not isinstance(constraint, _ELEMENTWISE):
            gathered.append((target, constraint))
        else:
            target.stored.assign(constraint(tf.convert_to_tensor(target.stored)), read_value=False)
    stored, layouts = [tf.convert_to_tensor(target.stored) for target, _ in gathered], [target.layout for target, _ in gathered]
    for place, local in gather_shards_in_buckets(program, stored, layouts, config.bucket_bytes, "all_gather/constraint"):
        target, constraint = gathered[place]
        target.store_global(constraint(gather_over_tensor(program, local, target.layout, "all_gather/constraint")))
