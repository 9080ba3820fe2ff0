"""Each rank's values of variables that every rank holds in their whole shape: copies, or summands, that may differ.

A summand is what a rank has added up of its own rows: of a metric, or of a gradient that is accumulated before it is reduced.
Their sum is what the variable is from outside; but a run that goes on from the sum adds up in another order. Copies differ where
ranks run other layers than their peers, but draw from one seed generator, each as often as it needs to. So what is to go on bit
by bit is read, and put back, rank by rank.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives import cross_replica_of
from tfdist.sharding.layout import Layout
from tfdist.sharding.replicated_variables import PartialSyncOnReadVariable


def holds_summands(variable: Any) -> bool:
    """Whether the ranks' values of `variable`, of TensorFlow, add up to it."""
    return isinstance(variable, PartialSyncOnReadVariable) and not variable.is_whole


def rank_values(variables: Sequence[Any]) -> list[np.ndarray]:
    """Returns what every rank holds of `variables`, each in rank order: (world_size, ...); who holds nothing has zeros.

    Where other workers have ranks it is one collective: all of them call it at once.

    Args:
        variables: variables of one tfdist strategy and of one dtype, which no rank holds a mere part of.
    """
    cross_replica = cross_replica_of(variables[0].distribute_strategy)
    held = [tf.concat([_flat(variable, index) for variable in variables], 0) for index in range(len(variables[0].values))]
    if cross_replica.is_multi_worker:
        packed = cross_replica.of_all_ranks(held, "rank_values")[0].numpy()
    else:
        packed = np.stack([one.numpy() for one in held])
    ends = np.cumsum([variable.layout.num_elements for variable in variables])
    pieces = np.split(packed, ends[:-1], axis=1)
    return [piece.reshape(-1, *variable.layout.shape) for piece, variable in zip(pieces, variables, strict=True)]


def assign_rank_values(variable: Any, values: np.ndarray) -> None:
    """Gives every rank back what `rank_values` has read of it; on another number of ranks, what `variable` was from outside."""
    layout, ranks = variable.layout, variable.distribute_strategy.extended.communicator.local_ranks
    if len(values) != layout.mesh.world_size:
        variable.assign(whole_of(values, holds_summands(variable)))
        return
    for rank, one in zip(ranks, variable.values, strict=True):
        if _is_whole(one, layout):
            one.assign(values[rank])


def whole_of(values: np.ndarray, are_summands: bool) -> np.ndarray:
    """Returns what a variable is from outside of which the ranks hold `values`; of copies, the one that was drawn from most."""
    return values.sum(0, values.dtype) if are_summands else max(values, key=lambda value: value.tolist())


def _flat(variable: Any, index: int) -> tf.Tensor:
    """Returns what the local rank at `index` holds; on the first device, where all are packed."""
    component, layout = variable.values[index], variable.layout
    with tf.device(component.device):
        value = component.read_value() if _is_whole(component, layout) else tf.zeros(layout.shape, component.dtype)
        return tf.reshape(value, [-1])


def _is_whole(component: tf.Variable, layout: Layout) -> bool:
    return tuple(component.shape) == layout.shape
