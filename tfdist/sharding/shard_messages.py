"""From shards to whole tensors and back, over the data axis: the messages in which flat shards are gathered and summed.

shard of each rank (L,)   -- gather_shards -->   local tensor of every rank   -- SumOfGradients -->   shard of the sum (L,)

Shards are gathered within a sharding group. Where there are several, of which each has a copy, sums are taken in two levels:

    whole (n,)  -- reduce-scatter within the group -->  shard of the group's sum (L,)  -- all-reduce over the groups -->  (L,)

so that what the groups send each other is each rank's shard, and that alone is compressed where gradients are.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, assign_buckets, group_ops
from tfdist.collectives.plan import Ranks
from tfdist.collectives.transports.transport import sum_dtype
from tfdist.sharding import packing
from tfdist.sharding.compression import COMPRESSION
from tfdist.sharding.config import MeshConfig
from tfdist.sharding.gradient_weight import weighted
from tfdist.sharding.layout import Layout
from tfdist.sharding.placements import Shard

# A variable from this size on, full and in bytes, travels alone: packed with its bias it would be copied three times.
LARGE_BYTES = 4 * 2**20


def gather_shards(program: RankProgram, shards: Sequence[tf.Tensor], layouts: Sequence[Layout], label: str) -> list[tf.Tensor]:
    """Returns the whole local tensors, of `layout.local_shape` each, from the group's `shards`, (L,) each. One message."""
    gathered = group_ops.all_gather_parts(program, shards, sharding_group(program, layouts), label)
    return packing.fulls_of(gathered, layouts, program.constant)


def sharding_group(program: RankProgram, layouts: Sequence[Layout]) -> Ranks:
    """Returns the ranks that together store what has one of `layouts`, all of one mesh, this one among them."""
    return layouts[0].mesh.group_ranks("shard", program.rank)


def gather_parameters(
    program: RankProgram, shards: Sequence[tf.Tensor], variables: Sequence[Any], label: str, config: MeshConfig, dtype: tf.DType
) -> list[tf.Tensor]:
    """Returns sharded `variables` whole, as `dtype`, from the group's `shards`, (L,) each, which travel as `config` says.

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
    gathered = COMPRESSION.now.all_gather(program, exact, chosen, sharding_group(program, layouts), label)
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


def gather_over_data(program: RankProgram, part: tf.Tensor, layout: Layout, label: str) -> tf.Tensor:
    """Returns the local tensor of `layout` from what each rank of the sharding group stores: shards, or one of them all of it."""
    if layout.data_owner is not None:
        ranks = program.group_ranks("shard")
        return group_ops.broadcast(program, part, layout.local_shape, ranks, ranks[layout.data_owner], label)
    return gather_shards(program, [part], [layout], label)[0] if layout.is_data_sharded else part


def gather_over_tensor(program: RankProgram, local: tf.Tensor, layout: Layout, label: str) -> tf.Tensor:
    """Returns the global tensor of `layout` from this rank's local one, gathered over the tensor axis."""
    if not layout.is_tensor_sharded:
        return local
    gathered = group_ops.all_gather(program, local[tf.newaxis], program.group_ranks("tensor"), label)
    return packing.join_tensor_shards(tf.unstack(gathered), layout)


@dataclasses.dataclass(frozen=True)
class SumOfGradients:
    """How the sums of the data ranks' whole gradients of `variables` are formed, in one message, sent as `config` says.

    Compressed, the plan says of the variables how their gradients travel, and what they lose on the way may be kept.

    Attributes:
        layouts: of what each rank keeps of the sums.
        weight: what this rank's gradients are multiplied by (see `GradientWeight`); None: nothing.
    """

    program: RankProgram
    config: MeshConfig
    variables: Sequence[Any]
    layouts: Sequence[Layout]
    label: str
    weight: tf.Tensor | None = None

    def scattered(self, summands: Sequence[tf.Tensor], dtype: tf.DType) -> list[tf.Tensor]:
        """Returns this rank's shards of the sums, as `dtype`."""
        program, config, ranks = self.program, self.config, sharding_group(self.program, self.layouts)
        rows = packing.rows_of(summands, self.layouts, program.constant)
        if self._is_compressed_whole:
            rows = [weighted(tf.cast(row, tf.float32), self.weight) for row in rows]
            return COMPRESSION.now.reduce_scatter(self, rows, ranks, dtype)
        rows = [weighted(row, self.weight) for row in rows]
        rows = [tf.cast(row, config.travel_dtype(row.dtype)) for row in rows]
        is_hybrid = self.layouts[0].mesh.is_hybrid
        shards = group_ops.reduce_scatter_parts(program, rows, ranks, self.label, dtype=sum_dtype(dtype) if is_hybrid else dtype)
        return [tf.cast(shard, dtype) for shard in (self._over_groups(shards) if is_hybrid else shards)]

    def everywhere(self, summands: Sequence[tf.Tensor], dtype: tf.DType) -> list[tf.Tensor]:
        """Returns the sums, whole and as `dtype`. They travel in shards, of which each rank sums one.

        Where they travel compressed in one level, all decode what a shard's owner has encoded of the sum, the owner too.
        """
        if self._is_compressed_whole:
            parts = [weighted(tf.cast(tf.reshape(summand, [-1]), tf.float32), self.weight) for summand in summands]
            ranks = sharding_group(self.program, self.layouts)
            sums = COMPRESSION.now.all_reduce(self, parts, ranks, self.label, dtype)
            return [tf.reshape(total, layout.local_shape) for total, layout in zip(sums, self.layouts, strict=True)]
        flat = [dataclasses.replace(layout, data=Shard()) for layout in self.layouts]
        wide = sum_dtype(dtype)
        sums = dataclasses.replace(self, layouts=flat, label=f"{self.label}/scatter").scattered(summands, wide)
        sums = [tf.cast(one, self.config.travel_dtype(wide)) for one in sums]
        return [tf.cast(whole, dtype) for whole in gather_shards(self.program, sums, flat, f"{self.label}/gather")]

    @property
    def _is_compressed_whole(self) -> bool:
        return self.config.compresses and not self.layouts[0].mesh.is_hybrid

    def _over_groups(self, shards: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums of the sharding groups' `shards`, (L,) each."""
        program, label = self.program, f"{self.label}/between_groups"
        ranks = self.layouts[0].mesh.group_ranks("replicate", program.rank)
        if self.config.compresses:
            shards = [tf.cast(shard, tf.float32) for shard in shards]
            return COMPRESSION.now.all_reduce(self, shards, ranks, label, tf.float32)
        packed = tf.cast(packing.side_by_side(shards, program.constant), self.config.travel_dtype(shards[0].dtype))
        total = group_ops.all_reduce(program, packed, ranks, "sum", label)
        return packing.split(total, [shard.shape for shard in shards], program.constant)


def messages_of(items: Sequence[Any], variables: Sequence[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Returns `items`, one for each of `variables`, by message: those that agree in `key` together, but large variables alone."""
    messages: dict[Any, list[Any]] = {}
    for item, variable in zip(items, variables, strict=True):
        is_large = variable.layout.local_elements * variable.dtype.size >= LARGE_BYTES
        messages.setdefault((key(item), id(variable) if is_large else None), []).append(item)
    return list(messages.values())


def scope_name(label: str) -> str:
    """Returns a label as a legal TensorFlow name scope."""
    return "".join(c if c.isalnum() or c in "_./-" else "_" for c in label)
