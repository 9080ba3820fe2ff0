"""After the update of weights, as Keras does it: their moving average and their constraints.

The exponential moving average (`use_ema`) is kept on the shards. A constraint (`kernel_constraint=...`) may need whole weights.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.optimizers.target import Target, local_part
from tfdist.sharding import MeshConfig
from tfdist.sharding.shard_messages import gather_over_tensor, gather_shards_in_buckets

# These look at one element at a time, and so may look at a shard.
_ELEMENTWISE = (keras.constraints.NonNeg,)


def update_averages(optimizer: Any, config: MeshConfig, program: RankProgram) -> None:
    """Moves each average towards its weight, as Keras does after a step, and overwrites the weights when it is time.

    An average is a slot: sharded from stage 1 on. Overwriting is local at stages 0 and 3; at stages 1 and 2 the averages are
    gathered, in the steps that overwrite.
    """
    pairs = [
        (target, local_part(average, program))
        for variable, average in zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
        if average is not None and (target := Target.of(variable, config, program)).is_stored
    ]
    not_first = tf.not_equal(tf.convert_to_tensor(optimizer.iterations), 0)
    for target, average in pairs:
        weight = target.read(target.stepped)
        momentum = tf.cast(not_first, weight.dtype) * optimizer.ema_momentum
        average.assign(momentum * average + (1 - momentum) * weight, read_value=False)
    if optimizer.ema_overwrite_frequency:
        is_due = tf.equal((tf.convert_to_tensor(optimizer.iterations) + 1) % optimizer.ema_overwrite_frequency, 0)
        program.cond(is_due, lambda: _overwrite(pairs, config, program))


def _overwrite(pairs: Sequence[tuple[Target, tf.Variable]], config: MeshConfig, program: RankProgram) -> None:
    """Gives each weight its average, which is stored as what the rank steps on: the weight itself, or a shard of it."""
    for target, average in pairs:
        if target.is_in_place:
            target.stored.assign(average, read_value=False)
    gathered = [(target, average) for target, average in pairs if not target.is_in_place]
    shards = [tf.convert_to_tensor(average) for _, average in gathered]
    layouts = [target.state_layout for target, _ in gathered]
    for place, whole in gather_shards_in_buckets(program, shards, layouts, config.bucket_bytes, "all_gather/average"):
        gathered[place][0].stored.assign(whole, read_value=False)


def constrain(variables: Sequence[Any], config: MeshConfig, program: RankProgram) -> None:
    """Applies to each of `variables` its constraint, if it has one.

    A replicated weight (stages 0 to 2) is whole on every rank and needs no message. A sharded one (stage 3, or over the tensor
    axis) is gathered for it, since a constraint may take the norm of a row, unless it is known to be elementwise.
    """
    gathered = []
    for variable in variables:
        constraint = getattr(variable, "constraint", None)
        if constraint is None:
            continue
        target = Target.of(variable, config, program)
        if target.layout.is_sharded and not isinstance(constraint, _ELEMENTWISE):
            gathered.append((target, constraint))
        else:
            target.stored.assign(constraint(tf.convert_to_tensor(target.stored)), read_value=False)
    stored, layouts = [tf.convert_to_tensor(target.stored) for target, _ in gathered], [target.layout for target, _ in gathered]
    for place, local in gather_shards_in_buckets(program, stored, layouts, config.bucket_bytes, "all_gather/constraint"):
        target, constraint = gathered[place]
        target.store_global(constraint(gather_over_tensor(program, local, target.layout, "all_gather/constraint")))
