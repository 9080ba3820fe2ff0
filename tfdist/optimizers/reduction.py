"""From the full gradients of a bucket to their sums over the data axis, in one message.

The placements of its variable decide:

    parameter sharded (stage 3)      the tape has reduced it: a flat shard (L,)        nothing moves
    state sharded (stages 1, 2)      reduce-scatter in buckets: a flat shard (L,)
    nothing sharded (stage 0)        all-reduce in buckets: of the parameter's shape

With several sharding groups sums are taken in two levels (`sharding.shard_messages`), at stage 0 too. With
`gradient_compression` gradients travel as `extensions.compression.compressed` says.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import RankProgram, group_ops
from tfdist.collectives.transports.transport import sum_dtype
from tfdist.optimizers.target import Target
from tfdist.sharding import MeshConfig, packing
from tfdist.sharding.gradient_weight import weighted
from tfdist.sharding.shard_messages import SumOfGradients


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
