"""Clipping of the reduced gradient: what one device clips.

Norms are summed over the ranks that hold the shards, all in one message: one number for the global norm, one per variable for
`clipnorm`. A gradient that every rank holds whole (stage 0) is summed on each of them, without a message.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, group_ops
from tfdist.mesh import MESH_AXES
from tfdist.placements.totals import wide
from tfdist.sharding import Layout, MeshConfig, Shard


def kind_of_clipping(optimizer: Any) -> str | None:
    """Returns the setting by which `optimizer` clips, None if it does not."""
    kinds = ("clipnorm", "global_clipnorm", "clipvalue")
    return next((kind for kind in kinds if getattr(optimizer, kind) and getattr(optimizer, kind) > 0), None)


def clip(
    kind: str, limit: float, grads: Sequence[tf.Tensor], layouts: Sequence[Layout], config: MeshConfig, program: RankProgram
) -> list[tf.Tensor]:
    """Returns `grads`, reduced ones of `layouts`, clipped as Keras does on one device by its setting `kind` of value `limit`."""
    if kind == "clipvalue":
        return [tf.clip_by_value(grad, -limit, limit) for grad in grads]
    if kind == "clipnorm":
        norms = tf.sqrt(_squares(grads, layouts, ("data", "tensor"), kind, config, program))
        factors = [limit / tf.maximum(norm, limit) for norm in tf.unstack(norms, num=len(grads))]
    else:
        factors = [global_factor(norm_of(grads, layouts, config, program), limit)] * len(grads)
    return [grad * tf.cast(factor, grad.dtype) for grad, factor in zip(grads, factors, strict=True)]


def global_factor(norm: tf.Tensor, limit: Any) -> tf.Tensor:
    """Returns what gradients whose global norm is `norm` are multiplied by; as in Keras, NaN where it is not finite."""
    limit = tf.cast(limit, norm.dtype)
    return limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)


def norm_of(grads: Sequence[tf.Tensor], layouts: Sequence[Layout], config: MeshConfig, program: RankProgram) -> tf.Tensor:
    """Returns the L2 norm of the gradients of all ranks together, (), of which `grads` are this rank's, reduced ones."""
    return tf.sqrt(_squares(grads, layouts, MESH_AXES, "global_norm", config, program, together=True))


def _squares(
    grads: Sequence[tf.Tensor],
    layouts: Sequence[Layout],
    mesh_axes: Sequence[str],
    label: str,
    config: MeshConfig,
    program: RankProgram,
    together: bool = False,
) -> tf.Tensor:
    """Returns the squared norm of each of `grads` over the ranks along `mesh_axes`, (len(grads),), or of all `together`, ().

    They are squared in a dtype that holds that: half precision overflows at 256.
    """
    squares = [tf.reduce_sum(tf.square(wide(grad))) for grad in grads]
    if not isinstance(config.placements.optimizer_state, Shard):
        mesh_axes = [mesh_axis for mesh_axis in mesh_axes if mesh_axis != "data"]  # all data ranks have reduced the same
    coordinate = program.mesh.coordinate(program.rank)
    result_dtype = tf.float64 if any(square.dtype == tf.float64 for square in squares) else tf.float32
    # Where ranks store different layers, one without a gradient (its layers are frozen) does not know the others' dtypes.
    dtype = tf.float64 if config.mesh.splits_layers else result_dtype
    counted = [
        tf.cast(square, dtype) if all(layout.counts_along(axis, coordinate) for axis in mesh_axes) else tf.zeros([], dtype)
        for square, layout in zip(squares, layouts, strict=True)
    ]
    total = tf.stack(counted) if counted else tf.zeros([0], dtype)
    total = tf.reduce_sum(total) if together else total
    for mesh_axis in mesh_axes:
        name = label if mesh_axis == "data" else f"{label}/{mesh_axis}"
        total = group_ops.all_reduce(program, total, program.group_ranks(mesh_axis), "sum", name)
    return tf.cast(total, result_dtype)
