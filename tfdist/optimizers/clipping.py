"""Clipping of the reduced gradient: what one device clips.

Norms are summed over the ranks that hold the parts, all in one message: one number for the global norm, one per variable for
`clipnorm`. A gradient that every rank holds whole (stage 0) is summed on each of them, without a message.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, current_program, wire
from tfdist.optimizers.reduction import ReducedGradient, reduce_gradients
from tfdist.optimizers.variables import layout_of, variable_of
from tfdist.sharding import MeshConfig, Shard, config_of


def clip(optimizer: Any, reduced: Sequence[ReducedGradient], config: MeshConfig, program: RankProgram) -> list[ReducedGradient]:
    """Returns `reduced`, clipped by `optimizer`'s `clipnorm`, `global_clipnorm` or `clipvalue`, as Keras does on one device."""
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        norms = tf.unstack(tf.sqrt(_squared_norms(reduced, config, program, "clipnorm")), num=len(reduced))
        factors = [optimizer.clipnorm / tf.maximum(norm, optimizer.clipnorm) for norm in norms]
    elif optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
        limit = optimizer.global_clipnorm
        norm = _global_norm(reduced, config, program)
        # As Keras: NaN where the norm is not finite.
        factors = [limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)] * len(reduced)
    elif optimizer.clipvalue and optimizer.clipvalue > 0:
        limit = optimizer.clipvalue
        return [gradient.then(lambda value: tf.clip_by_value(value, -limit, limit)) for gradient in reduced]
    else:
        return list(reduced)
    return [
        gradient.then(functools.partial(tf.multiply, tf.cast(factor, gradient.dtype)))
        for gradient, factor in zip(reduced, factors, strict=True)
    ]


def global_norm(grads: Sequence[Any], variables: Sequence[Any]) -> tf.Tensor:
    """Returns the L2 norm of the gradient of the global batch, for custom training loops.

    Call it on every rank, in the function given to `strategy.run`, with the gradients as they left the tape. At stages 0 to 2
    they are reduced for it; `optimizer.apply` called with the same gradients takes the reduced ones and does not reduce again.
    At stage 3 they are reduced already. One message of one number is added (none at stage 0).

    Under any other strategy, or none, it is `tf.linalg.global_norm(grads)`.

    Args:
        grads: gradients, one per variable; None is skipped.
        variables: the variables, of Keras or TensorFlow.

    Returns:
        A scalar, float32 (float64 if a gradient is), the same on all ranks.

    Raises:
        RuntimeError: called outside `strategy.run`.
        ValueError: the two have different lengths.
    """
    pairs = [(grad, variable) for grad, variable in zip(grads, variables, strict=True) if grad is not None]
    config = config_of(tf.distribute.get_strategy())
    if config is None:
        return tf.linalg.global_norm([grad for grad, _ in pairs])
    program = current_program("`global_norm`")
    reduced = reduce_gradients([grad for grad, _ in pairs], [variable_of(variable) for _, variable in pairs], config, program)
    return _global_norm(reduced, config, program)


def _global_norm(reduced: Sequence[ReducedGradient], config: MeshConfig, program: RankProgram) -> tf.Tensor:
    return tf.sqrt(_squared_norms(reduced, config, program, "global_norm", together=True))


def _squared_norms(
    reduced: Sequence[ReducedGradient], config: MeshConfig, program: RankProgram, label: str, together: bool = False
) -> tf.Tensor:
    """Returns the squared norm of each gradient, (len(reduced),), or of all of them `together`, ()."""
    with tf.device(program.device):
        squares = [tf.reduce_sum(tf.square(_widened(gradient.value))) for gradient in reduced]
        dtype = tf.float64 if any(square.dtype == tf.float64 for square in squares) else tf.float32
        squares = [tf.cast(square, dtype) for square in squares]
        layouts = [layout_of(gradient.variable, config) for gradient in reduced]
        is_cut = [layout.is_tensor_sharded for layout in layouts]
        coordinate = program.mesh.coordinate(program.rank)
        if any(is_cut) and coordinate.tensor:
            # What all tensor ranks hold counts once.
            squares = [square if cut else tf.zeros_like(square) for square, cut in zip(squares, is_cut, strict=True)]
        if together and config.mesh.pipeline_parallel_size > 1:
            # What several stages share, too; and a rank may have no weights at all.
            is_first = [layout.pipe_owners is None or layout.first_pipe == coordinate.pipe for layout in layouts]
            squares = [square for square, first in zip(squares, is_first, strict=True) if first] or [tf.zeros([], dtype)]
        local = tf.stack(squares)
        if together:
            local = wire.all_reduce(program, tf.reduce_sum(local), program.group_ranks("pipe"), "sum", f"{label}/pipe")
        if isinstance(config.placements.optimizer_state, Shard):
            local = wire.all_reduce(program, local, program.group_ranks("data"), "sum", label)
        return wire.all_reduce(program, local, program.group_ranks("tensor"), "sum", label) if any(is_cut) else local


def _widened(x: tf.Tensor) -> tf.Tensor:
    """Returns `x` in a dtype that holds its square: half precision overflows at 256."""
    return tf.cast(x, tf.float32) if x.dtype in (tf.float16, tf.bfloat16) else x
