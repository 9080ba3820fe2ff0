"""The gradients that an optimizer is given, as far as each has come: the rank's summand, or its part of a sum.

Before a step is planned the ranks agree on what is open (`take`), so that a plan is made of numbers alone: what backward has left
is reduced, what a rank's gradients count is known, and gradients that were changed by hand, which may hold random numbers, are
made the same on all ranks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram
from tfdist.optimizers.support import changes_gradients
from tfdist.optimizers.target import Target
from tfdist.placements.eager import EagerFacts
from tfdist.placements.kinds import Replicate
from tfdist.placements.telling import is_sum
from tfdist.sharding import MeshConfig, Shard, UnshardSchedule, packing
from tfdist.sharding.compression import COMPRESSION
from tfdist.sharding.gradient_state import GradientState
from tfdist.sharding.gradient_stubs import GradientStubs
from tfdist.sharding.gradient_weight import GradientWeight, without_weight
from tfdist.sharding.known_sums import KnownSums
from tfdist.sharding.shard_messages import gather_shards_in_buckets
from tfdist.sharding.tape_gradients import TapeGradients


@dataclasses.dataclass
class Given:
    """The gradients of one call of an optimizer, on one rank.

    Attributes:
        from_caller: as the user's code has them, by which sums are known.
        targets: what the rank steps on of each parameter.
        tensors: a summand of the parameter's shape; or what the rank keeps of a sum: a flat shard (L,), or all of it.
        states: how far each has come.
        are_summed: which are summands of what is summed, and weighted, already.
        weight: what the rank's summands count in their sums, a scalar; None: 1.
    """

    from_caller: list[Any]
    targets: list[Target]
    tensors: list[tf.Tensor] = dataclasses.field(default_factory=list)
    states: list[GradientState] = dataclasses.field(default_factory=list)
    are_summed: list[bool] = dataclasses.field(default_factory=list)
    weight: tf.Tensor | None = None


def take(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], config: MeshConfig, program: RankProgram) -> Given:
    """Returns what an optimizer, or None, is given as `grads`; sends what the ranks must agree on before a step is planned."""
    targets, known = [Target.of(variable, config, program) for variable in variables], program.part(KnownSums)
    given = Given(list(grads), targets)
    if any(known.part_of(grad) is None for grad in grads):
        program.part(UnshardSchedule).flush(grads)
        given.weight = program.part(GradientWeight).of_wholes()
    is_partial = optimizer is not None and accumulates_partial_sums(optimizer, config)
    changed = []  # places of those that the user's code has made of sums, and every rank has whole
    for place, (grad, target) in enumerate(zip(grads, targets, strict=True)):
        _check_is_whole(optimizer, grad, target)
        part, state = known.part_of(grad), GradientState.SUMMAND if is_partial else _kept_by(target)
        is_summed = is_partial and known.is_returned(grad)
        if is_summed:
            COMPRESSION.now.refuse_two_sums(config)
            tensor = summand_of_sum(part, target)
        elif is_partial:
            tensor = summand(grad, target, given.weight)
        elif part is not None:
            tensor = part
        else:
            tensor, state = own_part(grad, target)
            if state.is_reduced:
                changed += [place] if state is GradientState.WHOLE else []
                known.note(grad, tensor)
        given.tensors.append(tensor)
        given.states.append(state)
        given.are_summed.append(is_summed)
    if changed:
        wholes = _agreed([given.tensors[place] for place in changed], [targets[place] for place in changed], config, program)
        for place, whole in zip(changed, wholes, strict=True):
            given.tensors[place] = whole
    return given


def accumulates_partial_sums(optimizer: Any, config: MeshConfig) -> bool:
    """Whether gradients are accumulated before they are reduced: at stages 0 and 1, where a rank has room for whole ones.

    Not where a replica spans several ranks: what TensorFlow sums over ranks when it is read has one shape on all of them.
    """
    if isinstance(config.placements.gradient, Shard) or config.mesh.data_parallel_size < config.mesh.world_size:
        return False
    return bool(optimizer.gradient_accumulation_steps)


def _kept_by(target: Target) -> GradientState:
    """Returns what the rank keeps of the sum of a gradient."""
    return GradientState.SHARD if target.state_layout.is_data_sharded else GradientState.WHOLE


def _check_is_whole(optimizer: Any, grad: Any, target: Target) -> None:
    """Raises NotImplementedError for what an optimizer has made, in its own `apply`, of a shard as if it were whole."""
    if optimizer is None or not changes_gradients(optimizer) or not tf.is_tensor(grad):
        return
    is_shard = grad.shape == target.state_layout.component_shape != target.layout.local_shape
    if is_shard and target.program.part(KnownSums).part_of(grad) is None:
        name = type(optimizer).__name__
        raise errors.not_implemented(
            f"{name} changes gradients in an `apply` of its own and has been given shards, as `tfdist.clip_by_global_norm` "
            "returns them.",
            optimizer=name,
            fix="Clip by `tf.clip_by_global_norm`, which returns whole gradients, or by the optimizer's `global_clipnorm`.",
        )


def own_part(grad: Any, target: Target) -> tuple[tf.Tensor, GradientState]:
    """Returns `grad`, as the optimizer was given it, as far as it has come, and how far: a summand, or what this rank keeps of a
    sum."""
    program, kept = target.program, _kept_by(target)
    schedule = program.part(UnshardSchedule) if target.layout.is_data_sharded else None
    shard = program.part(GradientStubs).shard_of(grad) if schedule is not None and tf.is_tensor(grad) else None
    if shard is not None:
        return shard, kept
    grad = dense(grad, target)
    if schedule is not None and comes_reduced(grad, target):
        return grad, kept
    whole = program.part(TapeGradients).whole_of(grad)
    if schedule is not None and whole is None:
        is_sum = program.part(EagerFacts).is_whole_gradient(grad) if program.is_eager else schedule.is_of_sums(grad)
        whole = grad if is_sum and (not program.is_eager or schedule.has_gradient(target.variable)) else None
    elif grad.shape == target.state_layout.component_shape != target.layout.local_shape:
        return grad, kept  # of a slot, in which the program has kept sums
    if program.is_eager:
        whole = grad if whole is None and program.part(EagerFacts).is_whole(grad) else whole
    elif whole is None and program.part(TapeGradients).placement_of(grad) == Replicate():
        whole = grad
    if whole is None:
        return of_own_mean(grad, program), GradientState.SUMMAND
    if target.state_layout.is_data_sharded:
        data_rank = program.mesh.coordinate(program.rank).data
        return packing.data_shard(whole, target.state_layout, data_rank, program.constant), kept
    return whole, kept


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


def _agreed(grads: Sequence[tf.Tensor], targets: Sequence[Target], config: MeshConfig, program: RankProgram) -> list[tf.Tensor]:
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
