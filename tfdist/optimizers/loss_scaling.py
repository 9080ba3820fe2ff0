"""`LossScaleOptimizer` over ranks: one decision, taken by all of them, whether a step is taken or skipped.

Note: the scale before there is one. A custom `train_step` scales its loss before its optimizer has been built, in the
trace in which that is: Keras takes the initial scale, a constant, and TensorFlow traces again what has made variables. A rank's
function is traced once, and what has read the constant is made to read the variable when that is there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import Part, RankProgram, group_ops, rank_program
from tfdist.graphs import tape
from tfdist.mesh import MESH_AXES
from tfdist.optimizers.given import accumulates_partial_sums
from tfdist.optimizers.step import reduce_gradients, stepping_program, wholes_of
from tfdist.optimizers.support import changes_gradients
from tfdist.sharding import MeshConfig, Shard
from tfdist.sharding.compression import COMPRESSION
from tfdist.sharding.gradient_weight import GradientWeight, weighted
from tfdist.sharding.known_sums import KnownSums
from tfdist.sharding.tape_gradients import TapeGradients


class EarlyScales(Part):
    """The scales that one rank's program, in one trace, gave losses before their optimizers were built. A part of its state."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._given: list[tuple[Any, tf.Tensor]] = []

    def scaled(self, optimizer: Any, loss: Any) -> Any:
        """Returns `loss` times the scale of `optimizer`, which is not built."""
        with self._program.root.outermost():
            # No constant, so that all ranks' traces look alike: the next rank finds the optimizer built, and reads its variable.
            initial = tf.compat.v1.placeholder_with_default(tf.constant(optimizer.initial_scale, tf.float32), [])
            scale = tf.identity(initial)
        self._given.append((optimizer, scale))
        return keras.ops.multiply(loss, scale)

    def use_scale_of(self, optimizer: Any) -> None:
        """Lets what was scaled read the scale that `optimizer` has, which is built."""
        scales = [scale for given, scale in self._given if given is optimizer]
        self._given = [pair for pair in self._given if pair[0] is not optimizer]
        if scales:
            with self._program.root.outermost(), tape.stop_recording():
                now = tf.convert_to_tensor(optimizer.dynamic_scale)
        for scale in scales:
            tape.reconnect(scale.op, scale.op.inputs[0], now)


def scale_loss(original: Callable[..., Any], optimizer: Any, loss: Any) -> Any:
    """Returns `loss` times the scale that `optimizer` has when the step runs."""
    program = rank_program()
    if optimizer.built or program is None or program.is_eager or not tf.is_symbolic_tensor(loss):
        return original(optimizer, loss)
    return program.part(EarlyScales).scaled(optimizer, loss)


def apply_unscaled(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any] | None, config: MeshConfig) -> None:
    """Divides `grads` by the dynamic scale and lets the inner optimizer step; skips the step where they are not finite.

    The gradients are reduced first: an inf of one rank is then seen by all (stage 0), or by the one that holds its shard, and
    the ranks agree with one message of one number. Where gradients are accumulated before they are reduced (stages 0 and 1),
    the ranks agree on their own gradients.
    """
    program = stepping_program()
    with program.part(TapeGradients).own_use(grads):
        inner = optimizer.inner_optimizer
        variables = list(optimizer._trainable_variables if variables is None else variables)
        pairs = [(grad, variable) for grad, variable in zip(grads, variables, strict=True) if grad is not None]
        found = [grad for grad, _ in pairs]
        program.part(EarlyScales).use_scale_of(optimizer)
        scale = tf.convert_to_tensor(optimizer.dynamic_scale)
        steppers = getattr(inner, "optimizers", [inner])
        looks_at_gradients = any(map(changes_gradients, [inner, *steppers]))
        known = program.part(KnownSums)
        is_reduced = any(map(known.is_returned, found))
        is_partial = any(accumulates_partial_sums(each, config) for each in steppers)
        if is_partial and (looks_at_gradients or is_reduced):
            COMPRESSION.now.refuse_two_sums(config)
            is_partial = False
        if is_partial:
            # A gradient of a rank without rows says nothing. The inner optimizer weighs the others.
            counts = program.part(GradientWeight).of_tape()
            found = [weighted(tf.convert_to_tensor(grad), counts) for grad in found]
        else:
            found = reduce_gradients(found, [variable for _, variable in pairs], config, program)
        is_finite = _agreed(found, config, program, is_partial)
        unscaled = [grad / tf.cast(scale, grad.dtype) for grad in found]
        for grad in () if is_partial else unscaled:
            known.note(grad, grad, is_returned=True)
        if looks_at_gradients:
            unscaled = wholes_of(unscaled, [variable for _, variable in pairs], config, program)
        by_variable = {id(variable): grad for grad, (_, variable) in zip(unscaled, pairs, strict=True)}

        def step() -> None:
            inner.apply([by_variable.get(id(variable)) for variable in variables], variables)
            counter = tf.convert_to_tensor(optimizer.step_counter) + 1
            is_grown = tf.equal(counter, optimizer.dynamic_growth_steps)
            optimizer.step_counter.assign(tf.where(is_grown, tf.zeros_like(counter), counter))
            optimizer.dynamic_scale.assign(tf.where(is_grown, scale * 2.0, scale))

        def skip() -> None:
            optimizer.step_counter.assign(0)
            optimizer.dynamic_scale.assign(scale * 0.5)

        program.cond(is_finite, step, skip)


def _agreed(grads: Sequence[tf.Tensor], config: MeshConfig, program: RankProgram, is_partial: bool) -> tf.Tensor:
    """Returns, the same on all ranks, whether all of `grads` are finite on all of them.

    Partial sums must be so small that the sum over the ranks is finite too.
    """
    with tf.device(program.device):
        if is_partial:
            # What is compressed may be decoded a little larger.
            summands = config.mesh.data_parallel_size * (2 if config.compresses else 1)
            limits = [tf.cast(config.travel_dtype(grad.dtype).max / summands, grad.dtype) for grad in grads]
            finite = [tf.reduce_all(tf.abs(grad) <= limit) for grad, limit in zip(grads, limits, strict=True)]
        else:
            finite = [tf.reduce_all(tf.math.is_finite(grad)) for grad in grads]
        # As a float: a GPU has no sums of int32, and keeps int32 in the host's memory.
        together = tf.cast(tf.reduce_all(tf.stack(finite)), tf.float32)
        for mesh_axis in MESH_AXES:
            if mesh_axis == "data" and not (is_partial or isinstance(config.placements.optimizer_state, Shard)):
                continue  # all data ranks have seen the same
            label = "is_finite" if mesh_axis == "data" else f"is_finite/{mesh_axis}"
            together = group_ops.all_reduce(program, together, program.group_ranks(mesh_axis), "min", label)
        return tf.equal(together, 1.0)
