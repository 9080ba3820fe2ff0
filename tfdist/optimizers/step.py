"""The optimizer step under sharding: reduce, step on the shard, publish.

What happens to a variable follows from its placements, per variable:

    parameter sharded (stage 3)      the gradient is already a reduced shard          -> step on the component
    state sharded (stages 1, 2)      reduce-scatter in buckets -> step on the shard   -> all-gather in buckets
    nothing sharded (stage 0)        all-reduce in buckets                            -> step on the local copy
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram, assign_buckets, current_program, wire
from tfdist.optimizers.parameter_shard import ParameterShard
from tfdist.optimizers.shared_update import SharedUpdates, update_shard
from tfdist.optimizers.support import may_share
from tfdist.optimizers.whole_gradients import reduced_shard
from tfdist.sharding import Shard, ShardedVariable, ShardingConfig, UnshardSchedule, packing, tape


def sharded_step(
    optimizer: Any, grads: Sequence[Any], variables: Sequence[tf.Variable], learning_rate: Any, config: ShardingConfig
) -> None:
    """Reduces `grads` over the data axis (sum) and lets `optimizer` update `variables` with them.

    Args:
        optimizer: a Keras optimizer that `check_supported` accepts.
        grads: this rank's gradients as they left the tape; IndexedSlices are summed and made dense.
        variables: the distributed variables.
        learning_rate: scalar tensor.
        config: the strategy's sharding.

    Raises:
        RuntimeError: called outside `strategy.run`, or inside a loop or branch of the function given to it.
    """
    program = current_program("`optimizer.apply`")
    if tf.compat.v1.get_default_graph() is not program.graph:
        raise RuntimeError(
            errors.message(
                "`optimizer.apply` was called inside a loop, a branch or a nested `tf.function` of the function given to "
                "`strategy.run`; its collectives must stand outside.",
                fix="Put the loop around `strategy.run`, and `@tf.function` on the outermost function.",
            )
        )
    schedule = program.attachment(UnshardSchedule)
    schedule.flush(grads)
    schedule.invalidate()
    pairs = [(tf.convert_to_tensor(grad), variable) for grad, variable in zip(grads, variables, strict=True)]
    program.plan.note(program.rank, f"the optimizer is {_described(optimizer)}")
    with tf.device(program.device):
        step = _Step(optimizer, tf.convert_to_tensor(learning_rate), config, program)
        step.on_sharded([pair for pair in pairs if isinstance(pair[1], ShardedVariable)])
        full = [pair for pair in pairs if not isinstance(pair[1], ShardedVariable)]
        # Backward makes the last layers' gradients first: their buckets go first.
        full.reverse()
        if isinstance(config.placements.optimizer_state, Shard):
            step.on_shards_of_replicated(full)
        else:
            step.on_replicated(full)


def _described(optimizer: Any) -> str:
    """Returns class and hyperparameters; not the learning rate, which is a variable (and the chief's)."""
    settings = {
        name: value
        for name, value in sorted(vars(optimizer).items())
        if not name.startswith("_") and name not in ("name", "built") and isinstance(value, bool | int | float | str)
    }
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


# Stage 2: so many buckets of full gradients exist at once.
_BUCKETS_IN_FLIGHT = 2


class _Step:
    """One optimizer step of one rank."""

    def __init__(self, optimizer: Any, learning_rate: Any, config: ShardingConfig, program: RankProgram):
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._config = config
        self._program = program
        self._ranks = program.group_ranks("data")
        self._shared = SharedUpdates(optimizer, program.rank, learning_rate)

    def on_sharded(self, pairs: Sequence[tuple[tf.Tensor, ShardedVariable]]) -> None:
        """Stage 3: the tape's gradients are reduced shards."""
        for grad, variable in pairs:
            grad = reduced_shard(grad, variable, self._config, self._program)
            component = variable.component(self._program.rank)
            decays = self._decays(component)
            if may_share(self._optimizer):
                self._shared.of_component(variable, grad, decays)
            else:
                update_shard(self._optimizer, component, grad, self._learning_rate, decays)

    def on_replicated(self, pairs: Sequence[tuple[tf.Tensor, tf.Variable]]) -> None:
        """Stage 0: all-reduce, then every rank does the whole step."""
        for number, bucket in enumerate(self._buckets(pairs)):
            grads = [grad for grad, _ in bucket]
            flat = tf.concat([tf.reshape(grad, [-1]) for grad in grads], 0)
            wide = tf.cast(flat, self._config.reduce_dtype or flat.dtype)
            reduced = wire.all_reduce(self._program, wide, self._ranks, "sum", f"all_reduce/bucket_{number}")
            parts = tf.split(tf.cast(reduced, flat.dtype), [grad.shape.num_elements() for grad in grads])
            for part, (grad, variable) in zip(parts, bucket, strict=True):
                decays = self._decays(variable)
                update_shard(
                    self._optimizer, self._local(variable), tf.reshape(part, grad.shape), self._learning_rate, decays
                )

    def on_shards_of_replicated(self, pairs: Sequence[tuple[tf.Tensor, tf.Variable]]) -> None:
        """Stages 1 and 2: reduce-scatter every bucket, step on the shards, all-gather every bucket."""
        data_rank, constant = self._ranks.index(self._program.rank), self._program.constant
        buckets = self._buckets(pairs)
        layouts = [
            [self._config.slot_layout(self._config.parameter_layout(variable.shape)) for _, variable in bucket]
            for bucket in buckets
        ]
        reduced, sent = [], []
        for number, (bucket, cuts) in enumerate(zip(buckets, layouts, strict=True)):
            packed = packing.pack_full([grad for grad, _ in bucket], cuts, constant)
            wide = tf.cast(packed, self._config.reduce_dtype or packed.dtype)
            shard = wire.reduce_scatter(self._program, wide, self._ranks, f"reduce_scatter/bucket_{number}")
            shard = tf.cast(shard, packed.dtype)
            sent.append(shard)
            reduced.append(packing.split_shards(shard, cuts, constant))
        if isinstance(self._config.placements.gradient, Shard):
            self._hold_back(buckets, sent)
        for number, (bucket, cuts, grads) in enumerate(zip(buckets, layouts, reduced, strict=True)):
            shards = []
            for grad, layout, (_, variable) in zip(grads, cuts, bucket, strict=True):
                mine = packing.cut_shard(self._local(variable).value(), layout, data_rank)
                shards.append(self._updated_shard(variable, mine, grad))
            packed = packing.pack_shards(shards, constant)
            gathered = wire.all_gather(self._program, packed, self._ranks, f"all_gather/bucket_{number}")
            for (_, variable), full in zip(bucket, packing.unpack_full(gathered, cuts, constant), strict=True):
                self._local(variable).assign(full, read_value=False)

    def _hold_back(self, buckets: Sequence[Sequence[tuple[tf.Tensor, tf.Variable]]], sent: Sequence[tf.Tensor]) -> None:
        """Stage 2: a gradient is not computed before the bucket two before its own has been reduced.

        Otherwise backward outruns the chain of reductions and all full gradients exist at once, as in stage 1. An operation made
        after all gradients of the earlier buckets cannot be what they wait for, so the new edges close no cycle.
        """
        if self._program.is_eager or len(self._ranks) == 1 or len(buckets) <= _BUCKETS_IN_FLIGHT:
            return
        numbers = {op.name: number for number, op in enumerate(self._program.graph.get_operations())}
        latest = 0
        for bucket, reduction, held in zip(buckets, sent, buckets[_BUCKETS_IN_FLIGHT:], strict=False):
            latest = max(latest, *(numbers[grad.op.name] for grad, _ in bucket))
            for grad, _ in held:
                if numbers[grad.op.name] > latest:
                    tape.run_after(grad.op, reduction.op)

    def _updated_shard(self, variable: tf.Variable, shard: tf.Tensor, grad: tf.Tensor) -> tf.Tensor:
        """Returns this rank's `shard` of `variable` after the optimizer's update; the slots are updated in place."""
        parameter = ParameterShard(variable, shard)
        decays = self._decays(parameter)
        if may_share(self._optimizer):
            self._shared.of_shard(parameter, grad, decays)
        else:
            update_shard(self._optimizer, parameter, grad, self._learning_rate, decays)
        return parameter.value()

    def _decays(self, variable: Any) -> bool:
        return self._optimizer.weight_decay is not None and self._optimizer._use_weight_decay(variable)

    def _local(self, variable: tf.Variable) -> tf.Variable:
        return variable.values[self._program.local_index]

    def _buckets(self, pairs: Sequence[tuple[tf.Tensor, tf.Variable]]) -> list[list[tuple[tf.Tensor, tf.Variable]]]:
        sizes = [grad.shape.num_elements() * grad.dtype.size for grad, _ in pairs]
        buckets = assign_buckets(sizes, self._config.bucket_bytes, [grad.dtype for grad, _ in pairs])
        return [[pairs[index] for index in bucket] for bucket in buckets]
