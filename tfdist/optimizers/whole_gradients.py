"""Gradients of sharded parameters that did not come from the tape.

At stage 3 the tape hands out this rank's part of the summed gradient. A gradient that the program has made itself, of the
parameter's own shape, is this rank's summand instead, as at every other stage: it is reduced here.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram, wire
from tfdist.sharding import MeshConfig, ShardedVariable, UnshardSchedule, packing


def reduced_shard(grad: tf.Tensor, variable: ShardedVariable, config: MeshConfig, program: RankProgram) -> tf.Tensor:
    """Returns this rank's part, (L,), of the summed gradient of `variable`.

    Args:
        grad: what was given to `optimizer.apply`: such a part already, or a whole gradient, of which every rank gives its
            summand. Of a parameter of shape (1,) both look alike; it is a part if the tape was asked for it.
        variable: a parameter.
        config: the strategy's sharding.
        program: the rank's program.

    Raises:
        ValueError: `grad` has neither shape.
    """
    part = variable.component(program.rank).shape
    whole = variable.layout.local_shape
    is_whole = grad.shape.is_fully_defined() and grad.shape == whole
    if is_whole and (grad.shape != part or not program.attachment(UnshardSchedule).has_gradient(variable)):
        (rows,) = packing.rows_of([grad], [variable.layout])
        travelling = tf.cast(rows, config.travel_dtype(rows.dtype))
        label = f"reduce_scatter/{variable.name}"
        return wire.reduce_scatter(program, travelling, program.group_ranks("data"), label, dtype=variable.dtype)
    if not grad.shape.is_compatible_with(part):
        raise ValueError(
            errors.message(
                f"The gradient of sharded parameter {variable.name!r} must have its shape, {whole}, or be what the tape "
                f"returned, {part}.",
                shape=tuple(grad.shape) if grad.shape.rank is not None else None,
            )
        )
    return grad
