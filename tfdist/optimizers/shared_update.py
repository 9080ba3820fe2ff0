"""One traced update for all parameters of one shape, instead of one per parameter.

An update is some forty operations (Adam), and every rank traces one per parameter: in a deep model they are half of the step's
graph, in Python's memory, in TensorFlow's and in tracing time. Parameters whose shards agree in shape and dtype share one
function here, called with their own gradient, value and slots.

It holds for Keras's own elementwise optimizers, whose `update_step` depends on the parameter through its index only; a subclass
may look at a name or a path, and is traced parameter by parameter.

On a CPU the function of a large shard is compiled by XLA: Keras's Adam goes over memory ten times and more, the compiled one once
(docs/performance.md). A small shard's is not, since compiling takes about as long as its thousand steps save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.optimizers.parameter_shard import ParameterShard
from tfdist.optimizers.slots import slots_of
from tfdist.sharding import ShardedVariable

# From this many elements of a shard on its update is compiled.
COMPILED_ELEMENTS = 2**17


class SlotStandIn:
    """A slot, or what is stored of a parameter, inside a shared update: a variable known by its handle only."""

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

    def __init__(self, optimizer: Any, rank: int, learning_rate: tf.Tensor):
        self._optimizer = optimizer
        self._rank = rank
        self._learning_rate = learning_rate
        self._functions: dict[tuple, Any] = {}

    def of_component(self, variable: ShardedVariable, grad: tf.Tensor, decays: bool) -> None:
        """Updates this rank's component of `variable`, and its slots, in place (stage 3)."""
        component = variable.component(self._rank)

        def update(shard: ParameterShard, grad: tf.Tensor, rate: tf.Tensor, handle: tf.Tensor) -> None:
            stored = SlotStandIn(handle, component)
            shard = shard.with_value(stored.read_value())
            update_shard(self._optimizer, shard, grad, rate)
            stored.assign(shard.value())

        # Its value is read inside the function: outside only shape and dtype matter.
        spec = ParameterShard(variable, tf.TensorSpec(component.shape, component.dtype))
        self._call(update, spec, grad, decays, component)

    def of_shard(
        self,
        shard: ParameterShard,
        stored: tf.Variable,
        cut: Callable[[tf.Tensor], tf.Tensor],
        grad: tf.Tensor,
        decays: bool,
    ) -> tf.Tensor:
        """Updates the slots of `shard` in place and returns its new value (stages 1 and 2).

        The value is read in the function: `cut` from the whole parameter that is `stored` on this rank.
        """

        def update(shard: ParameterShard, grad: tf.Tensor, rate: tf.Tensor, handle: tf.Tensor) -> tf.Tensor:
            shard = shard.with_value(cut(SlotStandIn(handle, stored).read_value()))
            update_shard(self._optimizer, shard, grad, rate)
            return shard.value()

        return self._call(update, shard, grad, decays, stored)

    def _call(
        self, update: Callable[..., Any], shard: ParameterShard, grad: tf.Tensor, decays: bool, stored: tf.Variable
    ) -> Any:
        """Calls the function of `shard`'s kind on its own gradient, variable and slots."""
        slots = _sharded_slots(self._optimizer, shard)
        components = [slot.component(self._rank) for slot in slots]
        if tf.executing_eagerly():  # nothing to share
            return update(shard, grad, self._learning_rate, stored.handle)
        key = (tuple(shard.shape), tuple(stored.shape), shard.dtype, grad.dtype, decays)
        if key not in self._functions:
            is_compiled = grad.shape.num_elements() >= COMPILED_ELEMENTS and "CPU" in stored.device

            @tf.function(autograph=False, jit_compile=is_compiled or None, experimental_attributes={"_noinline": True})
            def shared(grad: tf.Tensor, rate: tf.Tensor, parameter: tf.Tensor, *handles: tf.Tensor) -> Any:
                with contextlib.ExitStack() as stack:
                    for slot, handle, component in zip(slots, handles, components, strict=True):
                        stack.enter_context(slot.replaced_by(SlotStandIn(handle, component)))
                    return update(shard, grad, rate, parameter)

            self._functions[key] = shared
        handles = [variable.handle for variable in (stored, *components)]
        return self._functions[key](grad, self._learning_rate, *handles)


def update_shard(optimizer: Any, shard: tf.Variable | ParameterShard, grad: tf.Tensor, learning_rate: tf.Tensor) -> None:
    """Weight decay and the Keras optimizer's own update, on whatever part of a parameter this rank steps."""
    # Not before the gradient is there: the decay alone, as large as the parameter, would lie in memory from the step's begin.
    with tf.control_dependencies([grad]):
        optimizer._apply_weight_decay([shard])
        optimizer.update_step(grad, shard, learning_rate)


def _sharded_slots(optimizer: Any, parameter: Any) -> list[ShardedVariable]:
    return [slot for slot in slots_of(optimizer, parameter) if isinstance(slot, ShardedVariable)]
