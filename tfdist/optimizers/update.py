"""The optimizer's own update of what a rank steps on, and of its slots: parameter by parameter, or for several side by side.

    gradients   g1 g1 g1 | g2 | g3 g3        one operation for all, where there was one for each parameter:
    values      w1 w1 w1 | w2 | w3 w3        fifteen of Keras's Adam for each of a model's hundred biases, norms and
    slots       m1 m1 m1 | m2 | m3 m3        small kernels cost more in calls than in arithmetic

The plan says which are updated side by side, and which by a function that several parameters share. Either holds for Keras's own
elementwise optimizers, whose `update_step` looks at nothing of a parameter but its elements (`support.may_share`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.optimizers.plan import Trace
from tfdist.optimizers.slots import slots_of, slots_replaced
from tfdist.optimizers.stand_in import StandIn
from tfdist.optimizers.target import Target, local_part
from tfdist.sharding import packing


def update(optimizer: Any, parameter: StandIn, grad: tf.Tensor, learning_rate: tf.Tensor) -> tf.Tensor:
    """Lets Keras's optimizer decay and update `parameter`, and its slots; returns the new value."""
    # Not before the gradient is there: the decay alone, as large as the parameter, would lie in memory from the step's begin.
    with tf.control_dependencies([grad]):
        optimizer._apply_weight_decay([parameter])
        optimizer.update_step(grad, parameter, learning_rate)
    return parameter.value()


def stand_in_of(optimizer: Any, variable: tf.Variable, value: tf.Tensor) -> StandIn:
    """Returns `variable`, a parameter that `optimizer` was built with, reading as `value`."""
    own = optimizer._trainable_variables[optimizer._get_variable_index(variable)]
    return StandIn(variable, value, getattr(own, "path", None))


def decays(optimizer: Any, variable: tf.Variable) -> bool:
    """Whether `optimizer` takes weight decay from `variable`."""
    return optimizer is not None and optimizer.weight_decay is not None and optimizer._use_weight_decay(variable)


class Updates:
    """The updates of one optimizer on one rank, in one step."""

    def __init__(self, optimizer: Any, learning_rate: tf.Tensor, program: RankProgram):
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._program = program
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def update(self, targets: Sequence[Target], grads: Sequence[tf.Tensor], trace: Trace) -> list[tf.Tensor]:
        """Updates `targets`, side by side if there are several, and their slots. Returns the new shards of parameters that this
        rank stores whole; what it steps on in place is stored already."""
        if trace is not Trace.INLINE and not tf.executing_eagerly():
            return self._call(targets[0], grads[0], trace is Trace.COMPILED)
        if len(targets) == 1:
            return self._update_one(targets[0], grads[0], self._learning_rate, targets[0].stepped)
        return self._update_side_by_side(targets, grads)

    def _update_one(
        self, target: Target, grad: tf.Tensor, learning_rate: tf.Tensor, stepped: tf.Variable | StandIn
    ) -> list[tf.Tensor]:
        with tf.control_dependencies([grad]):
            parameter = stand_in_of(self._optimizer, target.variable, target.read(stepped))
        return target.keep(update(self._optimizer, parameter, grad, learning_rate), stepped)

    def _update_side_by_side(self, targets: Sequence[Target], grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        constant = self._program.constant
        shapes = [grad.shape for grad in grads]
        slots = list(zip(*(self._slots(target) for target in targets), strict=True))
        grad = packing.side_by_side(grads, constant)
        with tf.control_dependencies([grad]):  # or the copies would lie in memory from the step's begin
            values = packing.side_by_side([target.read(target.stepped) for target in targets], constant)
            parameter = StandIn(targets[0].variable, values)
            stand_ins = [StandIn(same[0], packing.side_by_side([x.value() for x in same], constant)) for same in slots]
        with slots_replaced(self._optimizer, parameter, stand_ins):
            updated = packing.split(update(self._optimizer, parameter, grad, self._learning_rate), shapes, constant)
        for same, stand_in in zip(slots, stand_ins, strict=True):
            for slot, part in zip(same, packing.split(stand_in.value(), shapes, constant), strict=True):
                slot.assign(part, read_value=False)
        return [kept for target, value in zip(targets, updated, strict=True) for kept in target.keep(value, target.stepped)]

    def _call(self, target: Target, grad: tf.Tensor, is_compiled: bool) -> list[tf.Tensor]:
        """Calls the function of `target`'s kind on its own gradient, parameter and slots."""
        stepped, slots = target.stepped, self._slots(target)
        kinds = (decays(self._optimizer, target.variable), target.is_in_place, target.exact is None)
        key = (tuple(grad.shape), tuple(stepped.shape), stepped.dtype, grad.dtype, *kinds)
        if key not in self._functions:

            @tf.function(autograph=False, jit_compile=is_compiled or None, experimental_attributes={"_noinline": True})
            def shared(grad: tf.Tensor, rate: tf.Tensor, parameter: tf.Tensor, *handles: tf.Tensor) -> list[tf.Tensor]:
                stand_ins = [StandIn(slot, slot, handle=handle) for handle, slot in zip(handles, slots, strict=True)]
                with slots_replaced(self._optimizer, target.variable, stand_ins):
                    return self._update_one(target, grad, rate, StandIn(stepped, stepped, handle=parameter))

            self._functions[key] = shared
        handles = [variable.handle for variable in (stepped, *slots)]
        return self._functions[key](grad, self._learning_rate, *handles)

    def _slots(self, target: Target) -> list[tf.Variable]:
        return [local_part(slot, self._program) for slot in slots_of(self._optimizer, target.variable)]
