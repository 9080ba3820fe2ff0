"""Parameters whose copies are rounded, and the exact shards that are updated (`parameter_compression` at stages 1 and 2).

    every rank holds       the copy w, all of it, the same bits on all     and the exact shard e (L,), of which
                                                                           its part of w differs by rounding
    optimizer's step       e <- update of e
    message                Q(e - own part of w), encoded; all gather it
    every rank             w <- w + what is decoded of all, its own part, too

What a code loses stays in e - w, and is sent with the next step's difference: the error corrects itself, as it does in EF21
(Richtarik et al. 2021) and in the weights of SDP4Bit (Jia et al. 2024). The difference is to what all hold, bit by bit, so
nothing needs to be sent exactly now and then.

Who writes a copy in another way (`assign`, `set_weights`, loading, restoring, an average) writes the exact shard, too, and loses
what the copy lacked: what was assigned is what counts.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.extensions.compression import compressed
from tfdist.graphs import tape
from tfdist.optimizers.ownership import owner_of
from tfdist.optimizers.support import is_wrapper
from tfdist.optimizers.target import variable_of
from tfdist.sharding import packing
from tfdist.sharding.assembly import assemble
from tfdist.sharding.compression import EXACT
from tfdist.sharding.config import MeshConfig
from tfdist.sharding.placement_request import placement
from tfdist.sharding.replicated_variables import ReplicatedMirroredVariable
from tfdist.sharding.separate_thread import outside_ranks
from tfdist.sharding.variable import ShardedVariable
from tfdist.sharding.watched_writes import watch_writes

_OF_COPY = "_tfdist_exact_shard"


def keep_exact_shards_of(optimizer: Any, variables: Sequence[Any], config: MeshConfig) -> None:
    """Lets the ranks update exact shards of those of `variables` whose copies are to be rounded, from the first step on.

    What `optimizer` steps on as a whole travels exactly, and so does what has a constraint: it may look at whole copies, and what
    it makes of them is what counts.
    """
    for variable in () if is_wrapper(optimizer) else variables:
        if owner_of(optimizer, variable) is None and getattr(variable, "constraint", None) is None:
            keep_exact_shards(variable_of(variable), config)


def keep_exact_shards(variable: Any, config: MeshConfig) -> None:
    """Gives a parameter, of TensorFlow, exact shards if its copies are to be rounded and it has none: 4/N bytes an element."""
    if config.rounds_copies(variable.layout, variable.dtype) and variable.exact is None:
        outside_ranks(lambda: _make(variable))


def _make(variable: Any) -> None:
    layout, strategy = variable.layout, variable.distribute_strategy
    name = variable.name.partition(":")[0]
    is_inside = tf.distribute.get_strategy() is strategy
    with contextlib.nullcontext() if is_inside else strategy.scope(), tf.init_scope():
        with placement(slot_of=layout, data_owner=None, is_partial=False):
            zeros = functools.partial(tf.zeros, layout.shape, variable.dtype)
            exact = tf.Variable(zeros, trainable=False, name=f"{name}/exact", dtype=variable.dtype)
        for rank, copy, shard in zip(strategy.extended.communicator.local_ranks, variable.values, exact.values, strict=True):
            if layout.stores(layout.mesh.coordinate(rank)):
                setattr(copy, _OF_COPY, (shard, exact.layout, layout.mesh.coordinate(rank).data))
                _take_over(copy, lambda: None)
                watch_writes(copy, _take_over)
    variable.exact = exact


def _take_over(copy: Any, write: Callable[[], Any]) -> Any:
    """Writes a copy, and what is then its part into the exact shard."""
    written = write()
    shard, layout, data_rank = getattr(copy, _OF_COPY)
    with tf.device(copy.device), tape.stop_recording():
        part = packing.data_shard(copy.read_value(), layout, data_rank)
        # A slice shares its parent's buffer: without a copy of its own the old whole would live as long as the shard.
        shard.assign(tf.raw_ops.DeepCopy(x=part) if tf.executing_eagerly() else part, read_value=False)
    return written


def complete_copies(variables: Iterable[Any]) -> None:
    """Gives the copies of those of `variables`, of Keras or TensorFlow, that are rounded their exact values. Outside replicas.

    Where other workers hold some of the shards it is a collective: all workers call it at once.
    """
    for variable in variables:
        stored = getattr(variable, "_value", variable)
        if isinstance(stored, ReplicatedMirroredVariable | ShardedVariable) and stored.exact is not None:
            with tf.init_scope(), stored.distribute_strategy.scope():
                stored.assign(assemble(stored.exact))


def gather_differences(
    program: RankProgram, shards: Sequence[tf.Tensor], variables: Sequence[Any], label: str, config: MeshConfig
) -> list[Any]:
    """Brings this rank's copies of `variables` up to what the sharding group's `shards`, (L,) each, of them are. One message.

    Variables without exact shards get what the shards are. Returns the operations that write the copies; None where run eagerly.
    """
    layouts = [config.slot_layout(variable.layout) for variable in variables]
    compressors = [EXACT if each.exact is None else config.parameter_compressor_of(each.layout) or EXACT for each in variables]
    names = [variable.name.partition(":")[0] for variable in variables]
    program.plan.parameters[program.rank].update(zip(names, compressors, strict=True))
    data_rank, writes, parts = program.mesh.coordinate(program.rank).data, [], []
    for variable, shard, layout in zip(variables, shards, layouts, strict=True):
        part = tf.cast(shard, tf.float32)
        if variable.exact is not None:
            copy = variable.values[program.local_index].value()
            part -= tf.cast(packing.data_shard(copy, layout, data_rank, program.constant), tf.float32)
        parts.append(part)
    gathered = compressed.all_gather(program, parts, compressors, program.group_ranks("shard"), label)
    for variable, whole in zip(variables, packing.fulls_of(gathered, layouts, program.constant), strict=True):
        copy = variable.values[program.local_index]
        if variable.exact is None:
            writes.append(copy.assign(tf.cast(whole, copy.dtype), read_value=False))
        elif copy.dtype == tf.float32:  # by the handle, which `watch_writes` does not see: the exact shard stays
            writes.append(tf.raw_ops.AssignAddVariableOp(resource=copy.handle, value=whole))
        else:
            value = tf.cast(tf.cast(copy.value(), tf.float32) + whole, copy.dtype)
            writes.append(tf.raw_ops.AssignVariableOp(resource=copy.handle, value=value))
    return writes
