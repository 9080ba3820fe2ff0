"""Constraints of weights (`kernel_constraint=...`), applied after the step as Keras does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.optimizers.variables import is_data_sharded, local_part, variable_of
from tfdist.sharding import MeshConfig, ShardedVariable, packing
from tfdist.sharding.shard_messages import gather_over_tensor, gather_shards_in_buckets

# These look at one element at a time, and so may look at a shard.
_ELEMENTWISE = (keras.constraints.NonNeg,)


def constrain(variables: Sequence[Any], config: MeshConfig, program: RankProgram) -> None:
    """Applies to each of `variables` its constraint, if it has one.

    A replicated weight (stages 0 to 2) is whole on every rank and needs no message. A sharded one (stage 3, or cut over the
    tensor axis) is gathered for it, since a constraint may take the norm of a row, unless it is known to be elementwise.
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
    for value, constraint in gathered:
        if not is_data_sharded(value):
            local_part(value, program).assign(_constrained(local_part(value, program), value, constraint, program))
    gathered = [pair for pair in gathered if is_data_sharded(pair[0])]
    shards = [tf.convert_to_tensor(local_part(value, program)) for value, _ in gathered]
    layouts = [value.layout for value, _ in gathered]
    for place, whole in gather_shards_in_buckets(program, shards, layouts, config.bucket_bytes, "all_gather/constraint"):
        value, constraint = gathered[place]
        whole = _constrained(whole, value, constraint, program)
        shard = packing.cut_shard(whole, value.layout, program.mesh.coordinate(program.rank).data)
        local_part(value, program).assign(shard, read_value=False)


def _constrained(local: tf.Tensor, variable: ShardedVariable, constraint: Any, program: RankProgram) -> tf.Tensor:
    """Returns this rank's tensor cut after the constraint, which sees the whole weight."""
    layout = variable.layout
    whole = gather_over_tensor(program, tf.convert_to_tensor(local), layout, "all_gather/constraint")
    return packing.cut_tensor(constraint(whole), layout, program.mesh.coordinate(program.rank))
