"""From shards to whole tensors and back, over the data axis: the messages in which flat shards are gathered and summed.

shard of each rank (L,)   -- gather_shards -->   local tensor of every rank   -- scatter_sums -->   shard of the sum (L,)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, assign_buckets, compressed, group_ops
from tfdist.sharding import packing
from tfdist.sharding.config import MeshConfig
from tfdist.sharding.gradient_weight import weighted
from tfdist.sharding.layout import Layout
from tfdist.sharding.placements import Shard

# A variable from this size on, full and in bytes, travels alone: packed with its bias it would be copied three times.
LARGE_BYTES = 4 * 2**20


def gather_shards(program: RankProgram, shards: Sequence[tf.Tensor], layouts: Sequence[Layout], label: str) -> list[tf.Tensor]:
    """Returns the whole local tensors, of `layout.local_shape` each, from every data rank's `shards`, (L,) each. One message."""
    gathered = group_ops.all_gather_parts(program, shards, program.group_ranks("data"), label)
    return packing.fulls_of(gathered, layouts, program.constant)


def gather_parameters(
    program: RankProgram, shards: Sequence[tf.Tensor], variables: Sequence[Any], label: str, config: MeshConfig, dtype: tf.DType
) -> list[tf.Tensor]:
    """Returns sharded `variables` whole, as `dtype`, from every data rank's `shards`, (L,) each, which travel as `config` says.

    What the ranks compute with is then the same on all of them, and rounded where it is compressed: the owner's part, too.
    """
    layouts = [variable.layout for variable in variables]
    compressors = [config.parameter_compressor_of(layout) for layout in layouts]
    chosen = [compressor for compressor in compressors if compressor is not None]
    if not chosen or not dtype.is_floating or dtype.size > 4:
        return gather_shards(program, [tf.cast(shard, dtype) for shard in shards], layouts, label)
    names = [variable.name.partition(":")[0] for variable in variables]
    program.plan.parameters[program.rank].update(zip(names, chosen, strict=True))
    exact = [tf.cast(shard, tf.float32) for shard in shards]
    gathered = compressed.all_gather(program, exact, chosen, program.group_ranks("data"), label)
    return [tf.cast(whole, dtype) for whole in packing.fulls_of(gathered, layouts, program.constant)]


def gather_shards_in_buckets(
    program: RankProgram, shards: Sequence[tf.Tensor], layouts: Sequence[Layout], bucket_bytes: int, label: str
) -> Iterator[tuple[int, tf.Tensor]]:
    """Yields the place of each of `shards` and its whole tensor, gathered in messages of about `bucket_bytes`.

    What is not sharded over the data axis comes first, as it is.
    """
    sharded = [place for place, layout in enumerate(layouts) if layout.is_data_sharded]
    yield from ((place, shard) for place, shard in enumerate(shards) if place not in sharded)
    sizes = [shards[place].shape.num_elements() * shards[place].dtype.size for place in sharded]
    for number, bucket in enumerate(assign_buckets(sizes, bucket_bytes, [shards[place].dtype for place in sharded])):
        places = [sharded[index] for index in bucket]
        members, theirs = [shards[place] for place in places], [layouts[place] for place in places]
        yield from zip(places, gather_shards(program, members, theirs, f"{label}_{number}"), strict=True)


def gather_over_tensor(program: RankProgram, local: tf.Tensor, layout: Layout, label: str) -> tf.Tensor:
    """Returns the global tensor of `layout` from this rank's local one, gathered over the tensor axis."""
    if not layout.is_tensor_sharded:
        return local
    gathered = group_ops.all_gather(program, local[tf.newaxis], program.group_ranks("tensor"), label)
    return packing.join_tensor_shards(tf.unstack(gathered), layout)


def scatter_sums(
    program: RankProgram,
    summands: Sequence[tf.Tensor],
    layouts: Sequence[Layout],
    label: str,
    config: MeshConfig,
    dtype: tf.DType,
    weight: tf.Tensor | None = None,
) -> list[tf.Tensor]:
    """Returns this rank's shards, as `dtype`, of the sums of the data ranks' whole `summands`, sent as `config` says.

    With a `weight` this rank's summands are multiplied by it (see `GradientWeight`).
    """
    rows = packing.rows_of(summands, layouts, program.constant)
    if config.compresses:
        rows = [weighted(tf.cast(row, tf.float32), weight) for row in rows]
        compressors = [config.compressor_of(layout) for layout in layouts]
        return compressed.reduce_scatter(program, rows, compressors, program.group_ranks("data"), label, dtype=dtype)
    rows = [weighted(row, weight) for row in rows]
    rows = [tf.cast(row, config.travel_dtype(row.dtype)) for row in rows]
    return group_ops.reduce_scatter_parts(program, rows, program.group_ranks("data"), label, dtype=dtype)


def all_reduce_sums(
    program: RankProgram,
    summands: Sequence[tf.Tensor],
    layouts: Sequence[Layout],
    label: str,
    config: MeshConfig,
    dtype: tf.DType,
    weight: tf.Tensor | None = None,
) -> list[tf.Tensor]:
    """Returns the sums, whole and as `dtype`, of the data ranks' whole `summands`, which travel compressed both ways.

    Each rank sums a shard, as in `scatter_sums`, and all decode what its owner has encoded of the sum, the owner too.
    """
    flat = [dataclasses.replace(layout, data=Shard()) for layout in layouts]
    sums = scatter_sums(program, summands, flat, f"{label}/scatter", config, tf.float32, weight)
    compressors, ranks = [config.compressor_of(layout) for layout in flat], program.group_ranks("data")
    gathered = compressed.all_gather(program, sums, compressors, ranks, f"{label}/gather")
    return [tf.cast(whole, dtype) for whole in packing.fulls_of(gathered, flat, program.constant)]


def note_compressors(program: RankProgram, variables: Sequence[Any], config: MeshConfig) -> None:
    """Notes in the plan how the gradients of `variables` travel, where they are compressed."""
    if config.compresses:
        found = {variable.name.partition(":")[0]: config.compressor_of(variable.layout) for variable in variables}
        program.plan.gradients[program.rank].update(found)


def messages_of(items: Sequence[Any], variables: Sequence[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Returns `items`, one for each of `variables`, by message: those that agree in `key` together, but large variables alone."""
    messages: dict[Any, list[Any]] = {}
    for item, variable in zip(items, variables, strict=True):
        is_large = variable.layout.local_elements * variable.dtype.size >= LARGE_BYTES
        messages.setdefault((key(item), id(variable) if is_large else None), []).append(item)
    return list(messages.values())
