"""The exponential moving average of the weights (`use_ema`), kept on the shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.optimizers.variables import is_data_sharded, is_stored, local_part, variable_of
from tfdist.sharding import MeshConfig, packing
from tfdist.sharding.shard_messages import gather_shards_in_buckets


def update_averages(optimizer: Any, config: MeshConfig, program: RankProgram) -> None:
    """Moves each average towards its weight, as Keras does after a step, and overwrites the weights when it is time.

    An average is a slot: sharded from stage 1 on. Overwriting is local at stages 0 and 3; at stages 1 and 2 the averages are
    gathered, in the steps that overwrite.
    """
    pairs = [
        (variable_of(variable), variable_of(average))
        for variable, average in zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
        if average is not None and is_stored(variable_of(variable), program)
    ]
    not_first = tf.not_equal(tf.convert_to_tensor(optimizer.iterations), 0)
    for variable, average in pairs:
        weight = _local_weight(variable, average, program)
        stored = local_part(average, program)
        momentum = tf.cast(not_first, weight.dtype) * optimizer.ema_momentum
        stored.assign(momentum * stored + (1 - momentum) * weight, read_value=False)
    if optimizer.ema_overwrite_frequency:
        is_due = tf.equal((tf.convert_to_tensor(optimizer.iterations) + 1) % optimizer.ema_overwrite_frequency, 0)

        def overwrite() -> tf.Tensor:
            _overwrite(pairs, config, program)
            return tf.constant(True)

        program.cond(is_due, overwrite, lambda: tf.constant(False))


def _overwrite(pairs: Sequence[tuple[tf.Variable, tf.Variable]], config: MeshConfig, program: RankProgram) -> None:
    gathered = []
    for variable, average in pairs:
        if is_data_sharded(average) and not is_data_sharded(variable):
            gathered.append((variable, average))
        else:
            local_part(variable, program).assign(local_part(average, program), read_value=False)
    shards = [tf.convert_to_tensor(local_part(average, program)) for _, average in gathered]
    layouts = [average.layout for _, average in gathered]
    for place, whole in gather_shards_in_buckets(program, shards, layouts, config.bucket_bytes, "all_gather/average"):
        local_part(gathered[place][0], program).assign(whole, read_value=False)


def _local_weight(variable: tf.Variable, average: tf.Variable, program: RankProgram) -> tf.Tensor:
    """Returns this rank's weight, cut as its average is."""
    local = tf.convert_to_tensor(local_part(variable, program))
    if is_data_sharded(average) and not is_data_sharded(variable):
        return packing.cut_shard(local, average.layout, program.mesh.coordinate(program.rank).data)
    return local


def overwrite_with_averages(optimizer: Any, variables: Sequence[Any]) -> None:
    """Gives each of `variables` its moving average. Outside replicas, when training is over: one variable at a time is whole."""
    for variable, average in zip(variables, optimizer._model_variables_moving_average, strict=True):
        if average is not None:
            variable_of(variable).assign(variable_of(average).read_value())
