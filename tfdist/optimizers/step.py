"""One optimizer step: reduce, clip, step on what this rank holds, publish, average, constrain.

stage              the step's target            published by
0                  the local copy               nothing: all ranks step alike
1, 2               a shard of the copy          all-gather in buckets
3                  the component                nothing
1 to 3, owned      the whole, on its owner      a broadcast; the slots stay with the owner
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram, current_program, wire
from tfdist.optimizers.averaging import update_averages
from tfdist.optimizers.clipping import clip
from tfdist.optimizers.constraining import constrain
from tfdist.optimizers.drift import check_drift
from tfdist.optimizers.joint_update import Target, update_jointly
from tfdist.optimizers.owned_step import step_on_owners
from tfdist.optimizers.ownership import owner_of
from tfdist.optimizers.parameter_shard import parameter_shard, update_shard
from tfdist.optimizers.plain_slots import share_plain_slots
from tfdist.optimizers.reduction import ReducedGradient, buckets_of, reduce_gradients, reduced_when_asked
from tfdist.optimizers.shared_update import SharedUpdates, compiler_pays, is_large
from tfdist.optimizers.support import may_share
from tfdist.optimizers.variables import is_data_sharded, layout_of, local_part, variable_of
from tfdist.sharding import Layout, MeshConfig, Shard, UnshardSchedule, packing


def apply_gradients(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], config: MeshConfig) -> None:
    """Lets `optimizer` update `variables` with the sum of `grads` over the data axis; all but counting the step.

    The order is Keras's: unscale, accumulate, clip, decay, update, average, constrain.

    Args:
        optimizer: a Keras optimizer, built on `variables` (and others).
        grads: this rank's gradients as they left the tape, or `ReducedGradient`s; not None.
        variables: the variables, of Keras or TensorFlow.
        config: the strategy's sharding.

    Raises:
        RuntimeError: called outside `strategy.run`, or inside a loop or branch of the function given to it.
    """
    program = current_program("`optimizer.apply`")
    if not program.may_emit_here():
        raise RuntimeError(
            errors.message(
                "`optimizer.apply` was called inside a loop, a branch or a nested `tf.function` of the function given to "
                "`strategy.run`; its collectives must stand outside.",
                fix="Put the loop around `strategy.run`, and `@tf.function` on the outermost function.",
            )
        )
    program.plan.note(program.rank, f"the optimizer is {_described(optimizer)}")
    step = _Step(optimizer, variables, config, program)
    with tf.device(program.device):
        if optimizer.gradient_accumulation_steps:
            step.accumulate(grads)
        else:
            step.update(step.reduced(grads))
        if optimizer.use_ema:
            update_averages(optimizer, config, program)
        constrain(variables, config, program)
        share_plain_slots(optimizer, config, program)
        check_drift(optimizer, variables, config, program)


def accumulates_partial_sums(optimizer: Any, config: MeshConfig) -> bool:
    """Whether gradients are accumulated before they are reduced: at stages 0 and 1, where a rank has room for whole ones.

    Not with a tensor or a pipeline axis: what TensorFlow sums over ranks when it is read has one shape on all of them.
    """
    if isinstance(config.placements.gradient, Shard) or config.mesh.data_parallel_size < config.mesh.world_size:
        return False
    return bool(optimizer.gradient_accumulation_steps)


class _Step:
    """One call of `optimizer.apply` on one rank."""

    def __init__(self, optimizer: Any, variables: Sequence[Any], config: MeshConfig, program: RankProgram):
        self._optimizer = optimizer
        self._variables = [variable_of(variable) for variable in variables]
        self._config = config
        self._program = program

    def reduced(self, grads: Sequence[Any]) -> list[ReducedGradient]:
        """Returns the reduced gradients, without `loss_scale_factor`."""
        scale = self._optimizer.loss_scale_factor
        reduced = reduced_when_asked(grads, self._variables, self._config, self._program)
        return reduced if scale is None else [gradient.then(lambda value: value / scale) for gradient in reduced]

    def update(self, reduced: Sequence[ReducedGradient]) -> None:
        """Clips, decays, updates and publishes."""
        self._program.attachment(UnshardSchedule).invalidate()
        clipped = clip(self._optimizer, reduced, self._config, self._program)
        # By way of the optimizer, because some have something of their own to do once per step (Nadam).
        self._optimizer._backend_update_step(clipped, self._variables, self._optimizer.learning_rate)

    def accumulate(self, grads: Sequence[Any]) -> None:
        """Adds to the accumulators; in every `gradient_accumulation_steps`-th step updates with their mean and empties them.

        Stages 2 and 3 accumulate reduced shards. Stages 0 and 1 accumulate each rank's own gradients, and nothing travels
        before the last of the steps.
        """
        optimizer, program = self._optimizer, self._program
        count = optimizer.gradient_accumulation_steps
        is_partial = accumulates_partial_sums(optimizer, self._config)
        if is_partial:
            scale = optimizer.loss_scale_factor
            parts = [tf.convert_to_tensor(grad) for grad in grads]
            parts = parts if scale is None else [part / scale for part in parts]
        else:
            parts = [gradient.value for gradient in self.reduced(grads)]
        accumulators = [
            local_part(optimizer._accumulated_gradients[optimizer._get_variable_index(variable)].value, program)
            for variable in self._variables
        ]

        def last() -> tf.Tensor:
            means = [(part + accumulator) / count for part, accumulator in zip(parts, accumulators, strict=True)]
            if is_partial:
                reduced = reduce_gradients(means, self._variables, self._config, program)
            else:
                reduced = [ReducedGradient.of(*pair) for pair in zip(self._variables, means, strict=True)]
            self.update(reduced)
            for accumulator in optimizer._accumulated_gradients:
                accumulator = local_part(accumulator.value, program)
                accumulator.assign(tf.zeros_like(accumulator), read_value=False)
            return tf.constant(True)

        def not_last() -> tf.Tensor:
            for part, accumulator in zip(parts, accumulators, strict=True):
                accumulator.assign_add(part, read_value=False)
            return tf.constant(False)

        is_last = tf.equal((tf.convert_to_tensor(optimizer._iterations) + 1) % count, 0)
        program.cond(is_last, last, not_last)


def update_step(optimizer: Any, reduced: Sequence[ReducedGradient], learning_rate: Any, config: MeshConfig) -> None:
    """Steps on what this rank holds of each variable, and publishes the results. In the place of Keras's loop."""
    program = current_program("`optimizer.apply`")
    learning_rate = tf.convert_to_tensor(learning_rate)
    owned = [gradient for gradient in reduced if owner_of(optimizer, gradient.variable) is not None]
    shared = [gradient for gradient in reduced if owner_of(optimizer, gradient.variable) is None]
    sharded = [gradient for gradient in shared if is_data_sharded(gradient.variable)]
    full = [gradient for gradient in shared if not is_data_sharded(gradient.variable)]
    full.reverse()  # the order in which they were reduced
    layouts = [config.slot_layout(layout_of(gradient.variable, config)) for gradient in shared]
    is_compiled = compiler_pays([math.prod(layout.component_shape) for layout in layouts])
    update = _Update(optimizer, learning_rate, is_compiled, config, program)
    update.in_place(sharded)
    if isinstance(config.placements.optimizer_state, Shard):
        update.shards_of_copies(full)
    else:
        update.in_place(full)
    step_on_owners(optimizer, owned, learning_rate, config, program)


class _Update:
    """The optimizer's own update, on one rank."""

    def __init__(self, optimizer: Any, learning_rate: tf.Tensor, is_compiled: bool, config: MeshConfig, program: RankProgram):
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._config = config
        self._program = program
        self._shared = SharedUpdates(optimizer, program, learning_rate, is_compiled)

    def in_place(self, reduced: Sequence[ReducedGradient]) -> None:
        """Stages 0 and 3: step on what this rank stores."""
        small = []
        for gradient in reduced:
            stored = local_part(gradient.variable, self._program)
            decays = self._decays(stored)
            if not may_share(self._optimizer):
                self._step_on(stored, gradient)
            elif is_large(gradient.value):
                self._shared.in_place(gradient.variable, gradient.value, decays)
            else:
                small.append(Target(gradient.variable, stored, gradient.value, decays))
        for target, value in zip(small, self._updated_jointly(small), strict=True):
            target.stored.assign(value, read_value=False)

    def shards_of_copies(self, reduced: Sequence[ReducedGradient]) -> None:
        """Stages 1 and 2: step on the shards of a bucket, all-gather them.

        Stage 2 gathers a bucket when the next one's gradients have been reduced, and holds no more of either. Stage 1, where all
        full gradients exist at once, reduces all of them first: it loses no time to waiting for updates between.
        """
        program, constant = self._program, self._program.constant
        ranks = program.group_ranks("data")
        layouts = [self._config.slot_layout(layout_of(gradient.variable, self._config)) for gradient in reduced]
        whole = [tf.TensorSpec(layout.local_shape, gradient.dtype) for layout, gradient in zip(layouts, reduced, strict=True)]
        buckets = buckets_of(whole, self._config.bucket_bytes)
        ahead = 1 if isinstance(self._config.placements.gradient, Shard) else len(buckets)
        for number, bucket in enumerate(buckets):
            for place in itertools.chain(*buckets[number : number + ahead + 1]):
                _ = reduced[place].value
            shards = self._updated_shards([(reduced[place], layouts[place]) for place in bucket], ranks.index(program.rank))
            gathered = wire.all_gather_parts(program, shards, ranks, f"all_gather/bucket_{number}")
            fulls = packing.fulls_of(gathered, [layouts[place] for place in bucket], constant)
            for place, full in zip(bucket, fulls, strict=True):
                local_part(reduced[place].variable, program).assign(full, read_value=False)
            reduced[-1].note_gather(gathered[0])

    def _updated_shards(self, members: Sequence[tuple[ReducedGradient, Layout]], data_rank: int) -> list[tf.Tensor]:
        """Returns this rank's shards of variables after the optimizer's update; the slots are updated in place."""
        updated, small = {}, {}
        for place, (gradient, layout) in enumerate(members):
            stored = local_part(gradient.variable, self._program)
            spec = parameter_shard(self._optimizer, gradient.variable, tf.TensorSpec([layout.shard_elements], stored.dtype))
            cut = functools.partial(packing.cut_shard, layout=layout, data_rank=data_rank, constant=self._program.constant)
            if not may_share(self._optimizer):
                parameter = spec.with_value(cut(stored.value()))
                update_shard(self._optimizer, parameter, gradient.value, self._learning_rate)
                updated[place] = parameter.value()
            elif is_large(gradient.value):
                updated[place] = self._shared.of_shard(spec, stored, cut, gradient.value, self._decays(spec))
            else:
                small[place] = Target(gradient.variable, stored, gradient.value, self._decays(spec), cut)
        updated.update(zip(small, self._updated_jointly(list(small.values())), strict=True))
        return [updated[place] for place in range(len(members))]

    def _updated_jointly(self, targets: Sequence[Target]) -> list[tf.Tensor]:
        return update_jointly(self._optimizer, targets, self._learning_rate, self._program)

    def _step_on(self, stored: tf.Variable, gradient: ReducedGradient) -> None:
        """Steps on what this rank stores of a variable, for an optimizer that may ask more of it than its value."""
        parameter = parameter_shard(self._optimizer, gradient.variable, stored.read_value())
        update_shard(self._optimizer, parameter, gradient.value, self._learning_rate)
        stored.assign(parameter.value(), read_value=False)

    def _decays(self, variable: Any) -> bool:
        return self._optimizer.weight_decay is not None and self._optimizer._use_weight_decay(variable)


def _described(optimizer: Any) -> str:
    """Returns class and hyperparameters; not the learning rate, which is a variable (and the chief's)."""
    settings = {
        name: value
        for name, value in sorted(vars(optimizer).items())
        if not name.startswith("_") and name not in ("name", "built") and isinstance(value, bool | int | float | str)
    }
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"
