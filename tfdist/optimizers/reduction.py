"""From the gradients that left a rank's tape to the summed ones that its optimizer steps with.

What happens to a gradient follows from the placements of its variable:

    parameter sharded (stage 3)      the tape has reduced it: a flat shard             nothing moves
    state sharded (stages 1, 2)      reduce-scatter in buckets: a flat shard
    nothing sharded (stage 0)        all-reduce in buckets: the whole gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram, group_ops
from tfdist.optimizers.target import Target
from tfdist.sharding import MeshConfig, UnshardSchedule, packing
from tfdist.sharding.gradient_weight import weighted
from tfdist.sharding.shard_messages import scatter_sums


class KnownReductions:
    """What has been reduced in this trace, by the gradient as it left the tape: a flat shard (L,), or the whole sum.

    A reduced gradient is known, too, so that it may be given to `Optimizer.apply` in the place of a gradient.
    """

    def __init__(self, program: RankProgram):
        del program
        self._reduced: dict[int, tuple[Any, tf.Tensor]] = {}

    def find(self, grad: Any) -> tf.Tensor | None:
        """Returns the reduced counterpart of `grad`, None where it has not been reduced."""
        return self._reduced.get(id(grad), (None, None))[1]

    def add(self, grad: Any, reduced: tf.Tensor) -> None:
        # The gradients are kept, so that their ids stay their own.
        self._reduced.update({id(grad): (grad, reduced), id(reduced): (reduced, reduced)})


def dense(grad: Any, target: Target) -> tf.Tensor:
    """Returns a gradient as a tensor of static shape: that of rows of a batch of unknown size is forgotten on the way."""
    grad = tf.convert_to_tensor(grad)
    if not target.layout.is_data_sharded and not grad.shape.is_fully_defined():
        grad = tf.ensure_shape(grad, target.layout.local_shape)
    return grad


def comes_reduced(grad: tf.Tensor, target: Target) -> bool:
    """Whether `grad`, of a sharded parameter, is what the tape has reduced: this rank's shard of the sum.

    A gradient that the program has made itself, of the parameter's own shape, is this rank's summand instead, as at every other
    stage. Of a parameter of shape (1,) both look alike; it is a shard if the tape was asked for it.

    Raises:
        ValueError: `grad` has neither shape.
    """
    shard, whole = target.stored.shape, target.layout.local_shape
    if grad.shape.is_fully_defined() and grad.shape == whole:
        schedule = target.program.attachment(UnshardSchedule)
        return grad.shape == shard and schedule.has_gradient(target.variable)
    if not grad.shape.is_compatible_with(shard):
        raise errors.value_error(
            f"The gradient of sharded parameter {target.variable.name!r} must have its shape, {whole}, or be what the tape "
            f"returned, {shard}.",
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
    layouts = [target.state_layout for target in targets]
    if layouts[0].is_data_sharded:
        return scatter_sums(program, grads, layouts, f"reduce_scatter/{label}", config, dtype, weight)
    # Summed on the way: a gradient of half precision as float32, unless the user wants otherwise.
    wide = config.travel_dtype(tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype)
    flat = weighted(tf.cast(packing.side_by_side(grads, program.constant), wide), weight)
    reduced = tf.cast(group_ops.all_reduce(program, flat, program.group_ranks("data"), "sum", f"all_reduce/{label}"), dtype)
    return packing.apart(reduced, [grad.shape for grad in grads], program.constant)
