"""Constraints of weights (`kernel_constraint=...`), applied after the step as Keras does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import RankProgram, wire
from tfdist.optimizers.reduction import buckets_of
from tfdist.optimizers.variables import local_part, variable_of
from tfdist.sharding import ShardedVariable, ShardingConfig, packing

# These look at one element at a time, and so may look at a shard.
_ELEMENTWISE = (keras.constraints.NonNeg,)


def constrain(variables: Sequence[Any], config: ShardingConfig, program: RankProgram) -> None:
    """Applies to each of `variables` its constraint, if it has one.

    A replicated weight (stages 0 to 2) is whole on every rank and needs no message. A sharded one (stage 3) is gathered for it,
    since a constraint may take the norm of a row, unless the constraint is known to be elementwise.
    """
    gathered = []
    for variable in variables:
        constraint = getattr(variable, "constraint", None)
        if constraint is None:
            continue
        value = variable_of(variable)
        local = local_part(value, program)
        if isinstance(value, ShardedVariable) and not isinstance(constraint, _ELEMENTWISE):
            gathered.append((value, constraint))
        else:
            local.assign(constraint(tf.convert_to_tensor(local)), read_value=False)
    ranks = program.group_ranks("data")
    shards = [tf.convert_to_tensor(local_part(value, program)) for value, _ in gathered]
    for number, bucket in enumerate(buckets_of(shards, config.bucket_bytes)):
        layouts = [gathered[place][0].layout for place in bucket]
        packed = packing.pack_shards([shards[place] for place in bucket])
        full = wire.all_gather(program, packed, ranks, f"all_gather/constraint_{number}")
        for place, whole in zip(bucket, packing.unpack_full(full, layouts), strict=True):
            value, constraint = gathered[place]
            shard = packing.cut_shard(constraint(whole), value.layout, ranks.index(program.rank))
            local_part(value, program).assign(shard, read_value=False)
