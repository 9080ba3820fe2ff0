"""Reading a sharded parameter in an eager run: gathered at every read, its gradient reduced as soon as the tape has it.

There is no graph to rewrite, and no need to save memory or messages: every collective runs where it is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, ops
from tfdist.sharding import packing, tape
from tfdist.sharding.mesh_config import MeshConfig
from tfdist.sharding.shard_messages import gather_shards, scatter_sums


def read(variable: Any, dtype: tf.DType, program: RankProgram, config: MeshConfig, on_gradient: Callable[[], None]) -> tf.Tensor:
    """Returns the full (local) value of `variable` in `dtype`, on this rank's tapes; calls `on_gradient` when these want it."""
    shard = variable.component(program.rank).value()  # on the tapes that watch the variable
    with tape.stop_recording():
        (full,) = gather_shards(program, [tf.cast(shard, dtype)], [variable.layout], f"unshard/{variable.name}")
    gradient = functools.partial(_reduced, variable, program, config, on_gradient)
    tape.record_gradient("Unshard", [full], [shard], gradient)
    return full


def _reduced(
    variable: Any,
    program: RankProgram,
    config: MeshConfig,
    on_gradient: Callable[[], None],
    upstream: tf.Tensor | tf.IndexedSlices,
) -> list[tf.Tensor]:
    """The tape's way back: the rank's shard of the full gradients' sum."""
    on_gradient()
    full = tf.convert_to_tensor(upstream)  # IndexedSlices: duplicates summed
    with tape.stop_recording():
        travel_dtype, label = config.travel_dtype(full.dtype), f"reduce_scatter/{variable.name}"
        (shard,) = scatter_sums(program, [full], [variable.layout], label, travel_dtype, variable.dtype)
    tape.record_gradient("ReduceScatter", [shard], [full], functools.partial(second_order, variable, full.dtype))
    return [shard]


def second_order(variable: Any, dtype: tf.DType, upstream: tf.Tensor) -> list[tf.Tensor]:
    """The way back through the reduction, eager or traced: all ranks' parts of what is sent back to the reduced gradient."""
    gathered = ops.all_gather(tf.cast(upstream, dtype), "data", label=f"unshard/{variable.name}/second_order")
    return packing.fulls_of([gathered], [variable.layout])
