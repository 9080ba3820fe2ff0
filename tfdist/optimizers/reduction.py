"""From the gradients that left a rank's tape to the summed ones that its optimizer steps with.

What happens to a gradient follows from the placements of its variable:

    parameter sharded (stage 3)      the tape has reduced it: a flat shard             nothing moves
    state sharded (stages 1, 2)      reduce-scatter in buckets: a flat shard
    nothing sharded (stage 0)        all-reduce in buckets: the whole gradient

With several sharding groups sums are taken in two levels (`sharding.shard_messages`), at stage 0 too. With
`gradient_compression` gradients travel as `extensions.compression.compressed` says.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram, group_ops
from tfdist.collectives.transports.transport import sum_dtype
from tfdist.optimizers.target import Target
from tfdist.placements.eager import EagerFacts
from tfdist.placements.kinds import Replicate
from tfdist.placements.telling import is_sum
from tfdist.sharding import MeshConfig, Shard, UnshardSchedule, packing
from tfdist.sharding.gradient_stubs import GradientStubs
from tfdist.sharding.gradient_weight import GradientWeight, weighted, without_weight
from tfdist.sharding.shard_messages import SumOfGradients, gather_shards_in_buckets
from tfdist.sharding.tape_gradients import TapeGradients


def own_part(grad: Any, target: Target) -> tuple[tf.Tensor, bool]:
    """Returns `grad`, as the optimizer was given it, as far as it has come: a summand, or what this rank keeps of a sum; and
    whether it is reduced already."""
    program = target.program
    schedule = program.part(UnshardSchedule) if target.layout.is_data_sharded else None
    shard = program.part(GradientStubs).shard_of(grad) if schedule is not None and tf.is_tensor(grad) else None
    if shard is not None:
        return shard, True
    grad = dense(grad, target)
    if schedule is not None and comes_reduced(grad, target):
        return grad, True
    whole = program.part(TapeGradients).whole_of(grad)
    if schedule is not None and whole is None:
        is_sum = program.part(EagerFacts).is_whole_gradient(grad) if program.is_eager else schedule.is_of_sums(grad)
        whole = grad if is_sum and (not program.is_eager or schedule.has_gradient(target.variable)) else None
    elif grad.shape == target.state_layout.component_shape != target.layout.local_shape:
        return grad, True  # of a slot, in which the program has kept sums
    if program.is_eager:
        whole = grad if whole is None and program.part(EagerFacts).is_whole(grad) else whole
    elif whole is None and program.part(TapeGradients).placement_of(grad) == Replicate():
        whole = grad
    if whole is None:
        return of_own_mean(grad, program), False
    if target.state_layout.is_data_sharded:
        data_rank = program.mesh.coordinate(program.rank).data
        return packing.data_shard(whole, target.state_layout, data_rank, program.constant), True
    return whole, True


def summand(grad: Any, target: Target, weight: tf.Tensor | None) -> tf.Tensor:
    """Returns what this rank adds to the sum of a whole parameter's gradients, counted with `weight` (None: 1)."""
    grad = dense(grad, target)
    program = target.program
    whole = program.part(TapeGradients).whole_of(grad)
    if whole is None:
        return of_own_mean(grad, program)
    # All ranks have the sum. Their weights add up to 1; without weights it is the first rank's summand.
    is_first = weight is not None or program.mesh.coordinate(program.rank).data == 0
    return whole if is_first else tf.zeros_like(whole)


def of_own_mean(grad: tf.Tensor, program: RankProgram) -> tf.Tensor:
    """Returns `grad`, the dense value of what an optimizer was given, as the gradient of the rank's own mean.

    In a step of Keras's trainer what a tape returns for rows is one device's, and counts the rank's weight. So does what is made
    of it, by the chain rule or as IndexedSlices, and the reduction would count the weight again:

        rows = tf.gather(table, ids)                                      of_rows = tape.gradient(loss, rows)
        optimizer.apply([tf.IndexedSlices(of_rows, ids)], [table])
    """
    weights = program.part(GradientWeight)
    weight = weights.of_wholes() if weights.has_of_rows else None
    if weight is None:
        return grad
    placement = program.part(EagerFacts).of(grad) if program.is_eager else program.part(TapeGradients).placement_of(grad)
    return without_weight(grad, weight) if is_sum(placement) else grad


def summand_of_sum(total: tf.Tensor, target: Target) -> tf.Tensor:
    """Returns what this rank adds, so that the ranks' summands make the whole sum of which it has `total`: all, or its shard."""
    data_rank, size = target.program.mesh.coordinate(target.program.rank).data, target.layout.num_shards
    if not target.state_layout.is_data_sharded:
        return total if data_rank == 0 else tf.zeros_like(total)
    rows = [total if rank == data_rank else tf.zeros_like(total) for rank in range(size)]
    return packing.fulls_of([tf.stack(rows)], [target.state_layout])[0]


def agreed(grads: Sequence[tf.Tensor], targets: Sequence[Target], config: MeshConfig, program: RankProgram) -> list[tf.Tensor]:
    """Returns whole `grads`, each shard as the data rank of that number has it: they may have come from random numbers."""
    mesh = dataclasses.replace(config.mesh, sharding_group_size=None)  # all ranks are to have the same
    layouts = [dataclasses.replace(target.layout, mesh=mesh, data=Shard()) for target in targets]
    data_rank = program.mesh.coordinate(program.rank).data
    shards = [packing.data_shard(grad, layout, data_rank) for grad, layout in zip(grads, layouts, strict=True)]
    gathered = dict(gather_shards_in_buckets(program, shards, layouts, config.bucket_bytes, "all_gather/changed_gradient"))
    return [gathered[place] for place in range(len(grads))]


def dense(grad: Any, target: Target) -> tf.Tensor:
    """Returns a gradient as a tensor of static shape: that of rows of a batch of unknown size is forgotten on the way."""
    grad = tf.convert_to_tensor(grad)
    if not grad.shape.is_fully_defined() and (not target.layout.is_data_sharded or grad.shape.rank != 1):
        grad = tf.ensure_shape(grad, target.layout.local_shape)
    return grad


def comes_reduced(grad: tf.Tensor, target: Target) -> bool:
    """Whether `grad`, of a sharded parameter, is this rank's shard of a sum: a slot may have kept it.

    A gradient that the program has made itself, of the parameter's own shape, is this rank's summand instead, as at every other
    stage. Of a parameter of shape (1,) both look alike; it is a shard if the tape was asked for it.

    Raises:
        ValueError: `grad` has neither shape.
    """
    shard, whole = target.stored.shape, target.layout.local_shape
    if grad.shape.is_fully_defined() and grad.shape == whole:
        schedule = target.program.part(UnshardSchedule)
        return grad.shape == shard and schedule.has_gradient(target.variable)
    if not grad.shape.is_compatible_with(shard):
        raise errors.value_error(
            f"The gradient of sharded parameter {target.variable.name!r} must have its shape, {whole}, or be a "
            f"shard of a sum, {shard}.",
            shape=tuple(grad.shape) if grad.shape.rank is not None else None,
        )
    return True


def reduce_bucket(
    grads: Sequence[tf.Tensor],
    targets: Sequence[Target],
    label: str,
    config: MeshConfig,
    program: RankProgram,
    weight: tf.Tensor | None = None,
) -> list[tf.Tensor]:
    """Returns the sums of full `grads`, of one dtype, over the data axis: this rank's shards, or whole if none is sharded.

    This rank's gradients count `weight` in them, or 1.
    """
    dtype = grads[0].dtype
    layouts, variables = [target.state_layout for target in targets], [target.variable for target in targets]
    if layouts[0].is_data_sharded:
        return SumOfGradients(program, config, variables, layouts, f"reduce_scatter/{label}", weight).scattered(grads, dtype)
    if config.compresses or config.mesh.is_hybrid:
        return SumOfGradients(program, config, variables, layouts, f"all_reduce/{label}", weight).everywhere(grads, dtype)
    # Summed on the way: a gradient of half precision as float32, unless the user wants otherwise.
    wide = config.travel_dtype(sum_dtype(dtype))
    flat = weighted(tf.cast(packing.side_by_side(grads, program.constant), wide), weight)
    reduced = tf.cast(group_ops.all_reduce(program, flat, program.group_ranks("data"), "sum", f"all_reduce/{label}"), dtype)
    return packing.split(reduced, [grad.shape for grad in grads], program.constant)
