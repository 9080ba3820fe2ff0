"""One traced update for all parameters of one shape, instead of one per parameter.

An update is some forty operations (Adam), and every rank traces one per parameter: in a deep model they are half of the step's
graph, in Python's memory, in TensorFlow's and in tracing time. Parameters whose shards agree in shape and dtype share one
function here, called with their own gradient, value and slots.

It holds for Keras's own elementwise optimizers, whose `update_step` depends on the parameter through its index only; a subclass
may look at a name or a path, and is traced parameter by parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.optimizers.parameter_shard import ParameterShard
from tfdist.sharding import ShardedVariable


class SlotStandIn:
    """A slot inside a shared update: a variable known by its handle only."""

    def __init__(self, handle: tf.Tensor, slot: tf.Variable):
        self._handle = handle
        self.dtype = slot.dtype
        self.shape = slot.shape
        self.device = slot.device

    def read_value(self) -> tf.Tensor:
        value = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self.dtype)
        value.set_shape(self.shape)
        return value

    def assign(self, value: tf.Tensor, **_: Any) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def assign_add(self, value: tf.Tensor, **_: Any) -> None:
        tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=value)

    def assign_sub(self, value: tf.Tensor, **_: Any) -> None:
        tf.raw_ops.AssignSubVariableOp(resource=self._handle, value=value)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.read_value(), dtype, name=name)


class SharedUpdates:
    """The update functions of one optimizer on one rank, by the shape of what they update."""

    def __init__(self, optimizer: Any, rank: int):
        self._optimizer = optimizer
        self._rank = rank
        self._functions: dict[tuple, Any] = {}

    def __call__(self, parameter: ParameterShard, grad: tf.Tensor, learning_rate: tf.Tensor, decays: bool) -> None:
        """Updates `parameter` (its noted value, and its slots in place) with `grad`."""
        slots = slots_of(self._optimizer, parameter)
        components = [slot.component(self._rank) for slot in slots]
        key = (tuple(parameter.shape), parameter.dtype, decays, grad.dtype)
        if key not in self._functions:
            self._functions[key] = self._trace(parameter, slots, components, decays)
        handles = [component.handle for component in components]
        parameter.assign(self._functions[key](grad, parameter.value(), learning_rate, *handles))

    def _trace(
        self, parameter: ParameterShard, slots: Sequence[ShardedVariable], components: Sequence[tf.Variable], decays: bool
    ) -> Any:
        @tf.function(autograph=False, experimental_attributes={"_noinline": True})
        def update(grad: tf.Tensor, value: tf.Tensor, learning_rate: tf.Tensor, *handles: tf.Tensor) -> tf.Tensor:
            shard = parameter.with_value(value)
            with contextlib.ExitStack() as stack:
                for slot, handle, component in zip(slots, handles, components, strict=True):
                    stack.enter_context(slot.replaced_by(SlotStandIn(handle, component)))
                update_shard(self._optimizer, shard, grad, learning_rate, decays)
            return shard.value()

        return update


def update_shard(
    optimizer: Any, shard: tf.Variable | ParameterShard, grad: tf.Tensor, learning_rate: tf.Tensor, decays: bool
) -> None:
    """Weight decay and the Keras optimizer's own update, on whatever part of a parameter this rank steps."""
    if decays:
        rate = tf.cast(optimizer.learning_rate, shard.dtype)
        shard.assign_sub(shard * tf.cast(optimizer.weight_decay, shard.dtype) * rate)
    optimizer.update_step(grad, shard, learning_rate)


def slots_of(optimizer: Any, parameter: Any) -> list[ShardedVariable]:
    """Returns the sharded slots of `parameter`: its entry in each of the optimizer's lists of slots, by attribute name."""
    index = optimizer._get_variable_index(parameter)
    count = len(optimizer._trainable_variables)
    slots = []
    for name in sorted(vars(optimizer)):
        values = vars(optimizer)[name]
        if not isinstance(values, list) or len(values) != count:
            continue
        value = getattr(values[index], "value", None)
        if isinstance(value, ShardedVariable) and not value.is_parameter:
            slots.append(value)
    return slots

