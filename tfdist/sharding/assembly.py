"""Putting the shards of a variable together, for code outside replicas: reading, saving, a model called eagerly."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, Where, cross_replica_of, exclusion, group_ops, where
from tfdist.graphs import tape
from tfdist.mesh import Coordinate
from tfdist.sharding import packing
from tfdist.sharding.layout import Layout
from tfdist.sharding.shard_messages import gather_over_data, gather_over_tensor


def is_elsewhere(variable: Any) -> bool:
    """Whether other processes hold some of the shards of `variable`."""
    return len(variable.values) < variable.layout.mesh.world_size


def assemble(variable: Any) -> tf.Tensor:
    """Returns the full value of `variable`, a `ShardedVariable`; gradient tapes do not see how.

    Where other workers hold some of the shards it is a collective: all workers call it at once.
    """
    with tape.stop_recording():
        layout = variable.layout
        if not is_elsewhere(variable):
            with tf.device(variable.values[0].device), exclusion.alone():
                return join(layout, lambda rank: _read(variable.component(rank)))
        if where() is Where.SYMBOLIC_BUILD:
            return tf.zeros(layout.shape, variable.dtype)  # a scratch graph, which only wants the shape
        parts = [component.read_value() for component in variable.values]
        emit = functools.partial(gather_whole, layout)
        return cross_replica_of(variable.distribute_strategy).call(("assemble", layout), emit, parts)[0]


def join(layout: Layout, shard_of: Callable[[int], tf.Tensor]) -> tf.Tensor:
    """Returns the full value from shards that are all in this process; `shard_of` returns that of a rank which stores one."""
    mesh, pipe = layout.mesh, layout.first_pipe
    pieces = []
    for tensor in range(mesh.tensor_parallel_size if layout.is_tensor_sharded else 1):
        holders = range(layout.num_shards) if layout.is_data_sharded else [layout.data_owner or 0]
        # Only what is needed: a model that is called eagerly after a step puts all of its weights together.
        shards = [shard_of(mesh.rank(Coordinate(data, pipe, tensor))) for data in holders]
        piece = tf.concat(shards, 0) if len(shards) > 1 else tf.identity(shards[0])
        if piece.shape != layout.local_shape:
            piece = piece if piece.shape == [layout.local_elements] else tf.reshape(piece, [-1])[: layout.local_elements]
            piece = tf.reshape(piece, tf.constant(layout.local_shape, tf.int32))  # of a tuple it takes three times as long
        pieces.append(piece)
    return packing.join_tensor_shards(pieces, layout)


def _read(shard: tf.Variable) -> tf.Tensor:
    """Returns the value of `shard`; eagerly by one operation, where `read_value` runs two and some Python around them."""
    return tf.raw_ops.ReadVariableOp(resource=shard.handle, dtype=shard.dtype) if tf.executing_eagerly() else shard.read_value()


def gather_whole(layout: Layout, program: RankProgram, part: tf.Tensor) -> tf.Tensor:
    """Returns the full value from this rank's part, over all three axes."""
    owners = layout.pipe_owners
    if owners is None or program.mesh.coordinate(program.rank).pipe in owners:
        part = gather_over_tensor(program, gather_over_data(program, part, layout, "assemble"), layout, "assemble")
    if owners is None:
        return part
    stages = program.group_ranks("pipe")
    return group_ops.broadcast(program, part, layout.shape, stages, stages[layout.first_pipe], "assemble/pipe")
