"""One traced update for many parameters, instead of one per parameter.

An update is some forty operations (Adam), and every rank traces one per parameter: in a deep model they are half of the step's
graph, in Python's memory, in TensorFlow's and in tracing time. Here parameters share one function, called with their own
gradient, value and slots: those of one dtype, or, where the function is compiled, of one shape.

It holds for Keras's own elementwise optimizers, whose `update_step` depends on the parameter through its index only; a subclass
may look at a name or a path, and is traced parameter by parameter.

On a CPU the function of a large shard is compiled by XLA: Keras's Adam goes over memory ten times and more, the compiled one once
(docs/performance.md). All others' is not, since compiling takes about as long as a small shard's thousand steps save.
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

    def __init__(self, handle: tf.Tensor, slot: tf.Variable, shape: tf.TensorShape | None = None):
        self._handle = handle
        self.dtype = slot.dtype
        self.shape = slot.shape if shape is None else shape
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
    """The update functions of one optimizer on one rank, by what they update."""

    def __init__(self, optimizer: Any, rank: int, learning_rate: tf.Tensor):
        self._optimizer = optimizer
        self._rank = rank
        self._learning_rate = learning_rate
        self._functions: dict[tuple, Any] = {}

    def of_component(self, variable: ShardedVariable, grad: tf.Tensor, decays: bool) -> None:
        """Updates this rank's component of `variable`, and its slots, in place (stage 3)."""
        component = variable.component(self._rank)

        def update(shard: ParameterShard, grad: tf.Tensor, rate: tf.Tensor, stored: tf.Tensor) -> None:
            stored = SlotStandIn(stored, component, grad.shape)
            shard = shard.with_value(stored.read_value())
            update_shard(self._optimizer, shard, grad, rate)
            stored.assign(shard.value())

        # Its value is read inside the function: outside only shape and dtype matter.
        spec = ParameterShard(variable, tf.TensorSpec(component.shape, component.dtype))
        self._call(update, spec, grad, decays, component.handle, component)

    def of_shard(
        self,
        shard: ParameterShard,
        stored: tf.Variable,
        cut: Callable[[tf.Tensor], tf.Tensor],
        grad: tf.Tensor,
        decays: bool,
    ) -> tf.Tensor:
        """Updates the slots of `shard` in place and returns its new value (stages 1 and 2).

        The value is `cut` from the whole parameter that is `stored` on this rank: in the function if that knows its shape.
        """

        def update(shard: ParameterShard, grad: tf.Tensor, rate: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
            shard = shard.with_value(cut(SlotStandIn(value, stored).read_value()) if value.dtype == tf.resource else value)
            update_shard(self._optimizer, shard, grad, rate)
            return shard.value()

        value = stored.handle
        if not is_compiled(grad, stored):
            with tf.control_dependencies([grad]):  # not from the step's begin on
                value = cut(stored.read_value())
        return self._call(update, shard, grad, decays, value, stored)

    def _call(
        self,
        update: Callable[..., Any],
        shard: ParameterShard,
        grad: tf.Tensor,
        decays: bool,
        value: tf.Tensor,
        stored: tf.Variable,
    ) -> Any:
        """Calls the function of `shard`'s kind on its own gradient, value (or the variable that has it) and slots."""
        slots = slots_of(self._optimizer, shard)
        if tf.executing_eagerly() or not all(isinstance(slot, ShardedVariable) for slot in slots):  # nothing to share
            return update(shard, grad, self._learning_rate, value)
        components = [slot.component(self._rank) for slot in slots]
        has_shape = is_compiled(grad, stored)
        key = (shard.dtype, grad.dtype, decays, *((shard.shape, stored.shape) if has_shape else ()))
        arguments = [grad, self._learning_rate, value, *(component.handle for component in components)]
        if key not in self._functions:
            signature = [tf.TensorSpec(x.shape if has_shape or not x.shape.rank else [None], x.dtype) for x in arguments]

            def shared(grad: tf.Tensor, rate: tf.Tensor, value: tf.Tensor, *handles: tf.Tensor) -> Any:
                with contextlib.ExitStack() as stack:
                    for slot, handle, component in zip(slots, handles, components, strict=True):
                        stack.enter_context(slot.replaced_by(SlotStandIn(handle, component, grad.shape)))
                    return update(shard, grad, rate, value)

            self._functions[key] = tf.function(
                shared,
                input_signature=signature,
                autograph=False,
                jit_compile=has_shape or None,
                experimental_attributes={"_noinline": True},
            )
        return self._functions[key](*arguments)


def is_compiled(shard: tf.Tensor, stored: tf.Variable) -> bool:
    """Whether XLA compiles the update of a `shard` of the parameter that is `stored`."""
    return shard.shape.num_elements() >= COMPILED_ELEMENTS and "CPU" in stored.device


def update_shard(optimizer: Any, shard: tf.Variable | ParameterShard, grad: tf.Tensor, learning_rate: tf.Tensor) -> None:
    """Weight decay and the Keras optimizer's own update, on whatever part of a parameter this rank steps."""
    # Not before the gradient is there: the decay alone, as large as the parameter, would lie in memory from the step's begin.
    with tf.control_dependencies([grad]):
        optimizer._apply_weight_decay([shard])
        optimizer.update_step(grad, shard, learning_rate)
