"""One traced update for all large parameters of one shape, instead of one per parameter.

An update is some forty operations (Adam), and every rank traces one per parameter: in a deep model they are half of the step's
graph, in Python's memory, in TensorFlow's and in tracing time. Large parameters whose parts on a rank agree in shape and dtype
share one function here, called with their own gradient, value and slots; small ones are updated together (`joint_update`).

It holds for Keras's own elementwise optimizers, whose `update_step` depends on the parameter through its index only; a subclass
may look at a name or a path, and is traced parameter by parameter.

On a CPU very large parameters have functions that XLA compiles: Keras's Adam goes over memory ten times and more, the compiled
one once (docs/notes/performance.md). The compiler itself takes some 70 MB of a process, so it is there where that is little:
beside what the rank stores, or beside the results of Keras's operations, of which three or so are there at once, each as large
as the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.optimizers.parameter_shard import ParameterShard, update_shard
from tfdist.optimizers.slots import slots_of, slots_replaced
from tfdist.optimizers.variables import local_part

# From this many elements on a rank on a parameter is large.
LARGE_ELEMENTS = 2**17
# From this many on its update is compiled, on a CPU,
COMPILED_ELEMENTS = 2**20
# if the rank steps as many in all (270 MB of parameters, gradients and slots of Adam) or of one parameter (100 MB of results).
COMPILER_PAYS_IN_ALL = 2**24
COMPILER_PAYS_IN_ONE = 2**23


def is_large(grad: tf.Tensor) -> bool:
    """Whether the parameter of which a rank steps as many elements as `grad` has is updated here."""
    return grad.shape.num_elements() >= LARGE_ELEMENTS


def compiler_pays(elements: Sequence[int]) -> bool:
    """Whether updates are to be compiled of a rank that steps so many elements of each parameter."""
    return sum(elements) >= COMPILER_PAYS_IN_ALL or max(elements, default=0) >= COMPILER_PAYS_IN_ONE


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
    """The update functions of one optimizer on one rank, by the shape of what they update.

    Args:
        optimizer: a Keras optimizer.
        program: of the rank.
        learning_rate: a scalar.
        is_compiled: whether very large parameters' functions are compiled; on CPUs only.
    """

    def __init__(self, optimizer: Any, program: RankProgram, learning_rate: tf.Tensor, is_compiled: bool):
        self._optimizer = optimizer
        self._program = program
        self._learning_rate = learning_rate
        self._is_compiled = is_compiled and program.is_on_cpu
        self._functions: dict[tuple, Any] = {}

    def in_place(self, variable: tf.Variable, grad: tf.Tensor, decays: bool) -> None:
        """Updates what this rank stores of `variable`, and its slots, in place (stages 0 and 3)."""
        part = local_part(variable, self._program)

        def update(shard: ParameterShard, grad: tf.Tensor, rate: tf.Tensor, handle: tf.Tensor) -> None:
            stored = SlotStandIn(handle, part)
            shard = shard.with_value(stored.read_value())
            update_shard(self._optimizer, shard, grad, rate)
            stored.assign(shard.value())

        # Its value is read inside the function: outside only shape and dtype matter.
        self._call(update, ParameterShard(variable, tf.TensorSpec(part.shape, part.dtype)), grad, decays, part)

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

    def _call(self, update: Callable[..., Any], shard: ParameterShard, grad: tf.Tensor, decays: bool, stored: tf.Variable) -> Any:
        """Calls the function of `shard`'s kind on its own gradient, variable and slots."""
        if tf.executing_eagerly():  # nothing to share
            return update(shard, grad, self._learning_rate, stored.handle)
        slots = [local_part(slot, self._program) for slot in slots_of(self._optimizer, shard)]
        key = (tuple(shard.shape), tuple(stored.shape), shard.dtype, grad.dtype, decays)
        if key not in self._functions:
            is_compiled = self._is_compiled and grad.shape.num_elements() >= COMPILED_ELEMENTS

            @tf.function(autograph=False, jit_compile=is_compiled or None, experimental_attributes={"_noinline": True})
            def shared(grad: tf.Tensor, rate: tf.Tensor, parameter: tf.Tensor, *handles: tf.Tensor) -> Any:
                stand_ins = [SlotStandIn(handle, slot) for handle, slot in zip(handles, slots, strict=True)]
                with slots_replaced(self._optimizer, shard, stand_ins):
                    return update(shard, grad, rate, parameter)

            self._functions[key] = shared
        handles = [variable.handle for variable in (stored, *slots)]
        return self._functions[key](grad, self._learning_rate, *handles)
