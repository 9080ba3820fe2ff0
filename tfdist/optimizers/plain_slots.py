"""Slots that every rank keeps, of a weight that lives in one stage of a pipeline: factors of Adafactor, say.

An optimizer makes some slots without saying for which weight (`add_variable`). They are on every rank, and only the ranks of the
weight's stage update them. The others get the new values, so that what is read and saved is right, whichever rank is asked.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, wire
from tfdist.optimizers.slots import slots_of
from tfdist.optimizers.variables import local_part, variable_of
from tfdist.sharding import MeshConfig, ShardedVariable, packing


def share_plain_slots(optimizer: Any, config: MeshConfig, program: RankProgram) -> None:
    """Sends the plain slots of every stage's weights to the other ranks of the pipeline: one message for each stage's."""
    if config.mesh.pipeline_parallel_size == 1:
        return
    by_owner: dict[int, list[tf.Variable]] = {}
    for variable in optimizer._trainable_variables:
        value = variable_of(variable)
        if isinstance(value, ShardedVariable) and value.layout.pipe_owners is not None:
            plain = [slot for slot in slots_of(optimizer, value) if _is_plain(slot)]
            by_owner.setdefault(value.layout.first_pipe, []).extend(plain)
    ranks = program.group_ranks("pipe")
    for owner, slots in sorted(by_owner.items()):
        parts = [local_part(slot, program) for slot in slots]
        if not parts:
            continue
        dtype = tf.float64 if any(part.dtype == tf.float64 for part in parts) else tf.float32
        packed = packing.side_by_side([tf.cast(part, dtype) for part in parts], program.constant)
        sent = wire.broadcast(program, packed, packed.shape, ranks, ranks[owner], f"broadcast/slots_{owner}")
        for part, value in zip(parts, packing.apart(sent, [part.shape for part in parts], program.constant), strict=True):
            part.assign(tf.cast(value, part.dtype), read_value=False)


def _is_plain(slot: tf.Variable) -> bool:
    return not isinstance(slot, ShardedVariable) and slot.dtype.is_floating
