"""One update for many small parameters: side by side in one vector, of which each element is stepped on its own.

    gradients   g1 g1 g1 | g2 | g3 g3        one operation for all, where there was one for each parameter:
    values      w1 w1 w1 | w2 | w3 w3        fifteen of Keras's Adam for each of a model's hundred biases, norms and
    slots       m1 m1 m1 | m2 | m3 m3        small kernels cost more in calls than in arithmetic

For Keras's own elementwise optimizers (`support.may_share`). What is put side by side is copied, so a vector has about
`JOINT_ELEMENTS` at most; a large parameter is updated by itself (`shared_update`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.optimizers.parameter_shard import ParameterShard, update_shard
from tfdist.optimizers.reduction import buckets_of
from tfdist.optimizers.slots import slots_of, slots_replaced
from tfdist.optimizers.variables import local_part
from tfdist.sharding import packing

# Half a megabyte of float32.
JOINT_ELEMENTS = 2**17


@dataclasses.dataclass(frozen=True)
class Target:
    """What a rank steps of one parameter.

    Attributes:
        variable: the parameter, a distributed variable.
        stored: what of it is on this rank.
        grad: the reduced gradient, of the shape that the rank steps.
        decays: whether its weight decays.
        cut: makes of what is stored what the rank steps; None: it is that.
    """

    variable: tf.Variable
    stored: tf.Variable
    grad: tf.Tensor
    decays: bool
    cut: Callable[[tf.Tensor], tf.Tensor] | None = None

    def read(self) -> tf.Tensor:
        value = self.stored.value()
        return value if self.cut is None else self.cut(value)


def update_jointly(optimizer: Any, targets: Sequence[Target], learning_rate: tf.Tensor, program: RankProgram) -> list[tf.Tensor]:
    """Updates the slots of `targets` in place and returns the new values, which are not stored."""
    kinds: dict[Any, list[int]] = {}
    for place, target in enumerate(targets):
        kinds.setdefault((target.decays, target.variable.dtype), []).append(place)
    updated: dict[int, tf.Tensor] = {}
    for places in kinds.values():
        grads = [targets[place].grad for place in places]
        for bucket in buckets_of(grads, JOINT_ELEMENTS * grads[0].dtype.size):
            chosen = [places[number] for number in bucket]
            values = _update([targets[place] for place in chosen], optimizer, learning_rate, program)
            updated.update(zip(chosen, values, strict=True))
    return [updated[place] for place in range(len(targets))]


def _update(targets: Sequence[Target], optimizer: Any, learning_rate: tf.Tensor, program: RankProgram) -> list[tf.Tensor]:
    constant = program.constant
    shapes = [target.grad.shape for target in targets]
    slots = list(zip(*(slots_of(optimizer, target.variable) for target in targets), strict=True))
    grad = packing.side_by_side([target.grad for target in targets], constant)
    with tf.control_dependencies([grad]):  # or the copies would lie in memory from the step's begin
        parameter = ParameterShard(targets[0].variable, packing.side_by_side([target.read() for target in targets], constant))
        stand_ins = [
            ParameterShard(same[0], packing.side_by_side([local_part(slot, program).value() for slot in same], constant))
            for same in slots
        ]
        with slots_replaced(optimizer, parameter, stand_ins):
            update_shard(optimizer, parameter, grad, learning_rate)
    for same, stand_in in zip(slots, stand_ins, strict=True):
        for slot, part in zip(same, packing.apart(stand_in.value(), shapes, constant), strict=True):
            local_part(slot, program).assign(part, read_value=False)
    return packing.apart(parameter.value(), shapes, constant)
