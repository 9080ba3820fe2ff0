"""From the gradients that left a rank's tape to the summed ones that its optimizer steps with.

What happens to a gradient follows from the placements of its variable:

    parameter sharded (stage 3)      the tape has reduced it: a flat shard             nothing moves
    state sharded (stages 1, 2)      reduce-scatter in buckets: a flat shard
    nothing sharded (stage 0)        all-reduce in buckets: the whole gradient
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, assign_buckets, wire
from tfdist.optimizers.variables import is_data_sharded, layout_of
from tfdist.optimizers.whole_gradients import reduced_shard
from tfdist.sharding import Shard, ShardingConfig, UnshardSchedule, packing, tape

# Stage 2: so many buckets of full gradients exist at once.
_BUCKETS_IN_FLIGHT = 2
_REARRANGING = ("Reshape", "Transpose", "ConcatV2", "Cast", "Identity")


@dataclasses.dataclass(frozen=True, eq=False)
class ReducedGradient:
    """A gradient summed over the data axis, as far as this rank holds it.

    It may be passed to `Optimizer.apply` in the place of a gradient; it is not reduced again.

    Attributes:
        variable: the distributed variable.
        value: a flat shard (L,), padded with zeros, or the whole gradient.
    """

    variable: tf.Variable
    value: tf.Tensor

    def with_value(self, value: tf.Tensor) -> ReducedGradient:
        return dataclasses.replace(self, value=value)


class _Reductions:
    """What was reduced already in this trace, by the gradient it was made from."""

    def __init__(self, program: RankProgram):
        del program
        self._reduced: dict[int, tuple[tf.Tensor, ReducedGradient]] = {}

    def find(self, grads: Sequence[Any]) -> list[ReducedGradient] | None:
        """Returns the reduced counterparts of `grads`, None unless all are known."""
        found = [self._reduced.get(id(grad)) for grad in grads]
        return [reduced for _, reduced in found] if found and all(found) else None

    def add(self, grads: Sequence[Any], reduced: Sequence[ReducedGradient]) -> None:
        # The gradient is kept, so that its id stays its own.
        self._reduced.update({id(grad): (grad, result) for grad, result in zip(grads, reduced, strict=True)})


def reduce_gradients(
    grads: Sequence[Any], variables: Sequence[tf.Variable], config: ShardingConfig, program: RankProgram
) -> list[ReducedGradient]:
    """Sums `grads` over the data axis; each comes back as what this rank keeps of it.

    Args:
        grads: this rank's gradients as they left the tape; IndexedSlices are summed and made dense. What has been reduced in
            this trace already, and `ReducedGradient`s, are not reduced again.
        variables: the distributed variables.
        config: the strategy's sharding.
        program: the rank's program.
    """
    if all(isinstance(grad, ReducedGradient) for grad in grads):
        return list(grads)
    schedule = program.attachment(UnshardSchedule)
    schedule.flush(grads)
    known = program.attachment(_Reductions)
    reduced = known.find(grads)
    if reduced is None:
        with tf.device(program.device):
            dense = [_dense(grad, variable, config) for grad, variable in zip(grads, variables, strict=True)]
            reduced = _reduce(dense, variables, config, program)
        known.add(grads, reduced)
    return reduced


def _dense(grad: Any, variable: tf.Variable, config: ShardingConfig) -> tf.Tensor:
    """Returns a gradient as a tensor of static shape: that of rows of a batch of unknown size is forgotten on the way."""
    grad = tf.convert_to_tensor(grad)
    if not is_data_sharded(variable) and not grad.shape.is_fully_defined():
        grad = tf.ensure_shape(grad, layout_of(variable, config).local_shape)
    return grad


def _reduce(
    grads: Sequence[tf.Tensor], variables: Sequence[tf.Variable], config: ShardingConfig, program: RankProgram
) -> list[ReducedGradient]:
    reduced: list[Any] = [None] * len(grads)
    full = []
    for place, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
        if is_data_sharded(variable):
            reduced[place] = reduced_shard(grad, variable, config, program)
        else:
            full.append(place)
    # Backward makes the last layers' gradients first: their buckets go first.
    full.reverse()
    buckets = [
        [full[index] for index in bucket] for bucket in buckets_of([grads[place] for place in full], config.bucket_bytes)
    ]
    is_sharded = isinstance(config.placements.optimizer_state, Shard)
    sent = []
    for number, bucket in enumerate(buckets):
        members = [grads[place] for place in bucket]
        if is_sharded:
            layouts = [config.slot_layout(layout_of(variables[place], config)) for place in bucket]
            parts = _reduce_scatter(members, layouts, f"reduce_scatter/bucket_{number}", config, program)
            sent.append(parts[0])
        else:
            parts = _all_reduce(members, f"all_reduce/bucket_{number}", config, program)
        for place, part in zip(bucket, parts, strict=True):
            reduced[place] = part
    if isinstance(config.placements.gradient, Shard):
        _hold_back([[grads[place] for place in bucket] for bucket in buckets], sent, program)
    return [ReducedGradient(variable, value) for variable, value in zip(variables, reduced, strict=True)]


def buckets_of(tensors: Sequence[tf.Tensor], bucket_bytes: int) -> list[list[int]]:
    """Returns the places in `tensors`, in order, cut in buckets of one dtype and about `bucket_bytes`."""
    sizes = [tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors]
    return assign_buckets(sizes, bucket_bytes, [tensor.dtype for tensor in tensors])


def _all_reduce(
    grads: Sequence[tf.Tensor], label: str, config: ShardingConfig, program: RankProgram
) -> list[tf.Tensor]:
    flat = packing.side_by_side(grads, program.constant)
    # Summed on the way: a gradient of half precision as float32, unless the user wants otherwise.
    is_half = flat.dtype in (tf.float16, tf.bfloat16)
    wide = tf.cast(flat, config.travel_dtype(tf.float32 if is_half else flat.dtype))
    reduced = tf.cast(wire.all_reduce(program, wide, program.group_ranks("data"), "sum", label), flat.dtype)
    return packing.apart(reduced, [grad.shape for grad in grads], program.constant)


def _reduce_scatter(
    grads: Sequence[tf.Tensor], layouts: Sequence[Any], label: str, config: ShardingConfig, program: RankProgram
) -> list[tf.Tensor]:
    """Returns this rank's shards of the sums."""
    dtype = grads[0].dtype
    rows = [tf.cast(row, config.travel_dtype(dtype)) for row in packing.rows_of(grads, layouts, program.constant)]
    return wire.reduce_scatter_parts(program, rows, program.group_ranks("data"), label, dtype=dtype)


def _hold_back(
    buckets: Sequence[Sequence[tf.Tensor]], sent: Sequence[tf.Tensor], program: RankProgram
) -> None:
    """Stage 2: a gradient is not computed before the bucket two before its own has been reduced.

    Otherwise backward outruns the chain of reductions and all full gradients exist at once, as in stage 1. An operation made
    after all gradients of the earlier buckets cannot be what they wait for, so the new edges close no cycle.
    """
    if program.is_eager or tf.compat.v1.get_default_graph() is not program.graph:
        return
    if len(program.group_ranks("data")) == 1 or len(buckets) <= _BUCKETS_IN_FLIGHT:
        return
    numbers = {op.name: number for number, op in enumerate(program.graph.get_operations())}
    latest = 0
    for bucket, reduction, held in zip(buckets, sent, buckets[_BUCKETS_IN_FLIGHT:], strict=False):
        latest = max(latest, *(numbers[grad.op.name] for grad in bucket))
        for grad in held:
            for operation in _computed_by(grad.op, latest, numbers):
                tape.run_after(operation, reduction.op)


def _computed_by(operation: tf.Operation, latest: int, numbers: Mapping[str, int]) -> list[tf.Operation]:
    """Returns `operation`, or those whose results it only rearranges, where they were made after number `latest` as well."""
    if numbers[operation.name] <= latest:
        return []
    sources = [tensor.op for tensor in operation.inputs if tensor.dtype.is_floating] if operation.type in _REARRANGING else []
    return [found for source in sources for found in _computed_by(source, latest, numbers)] or [operation]
