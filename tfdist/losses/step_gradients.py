"""Gradients of a rank's own means, in a step of Keras's trainer: see `trainer_step`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, rank_program
from tfdist.custom_gradients import with_adjoint
from tfdist.graphs import tape
from tfdist.losses.custom_meetings import has_custom_gradients
from tfdist.losses.row_means import RowMeans
from tfdist.losses.static_rows import has_rows
from tfdist.losses.tensors_of_weights import is_of_weights
from tfdist.losses.trainer_step import trainer_step
from tfdist.losses.warning import warn_of_step
from tfdist.sharding.gradient_weight import GradientWeight


def weighted_in_gradient(loss: Any) -> Any:
    """Returns `loss`, a rank's own mean, with a gradient that counts the rank's weight. A loss of every row is no mean."""
    step = trainer_step()
    if step is None or loss is None:
        return loss
    loss = tf.convert_to_tensor(loss)
    warn_of_step(step.model, rank_program(), loss)
    if _is_over_rows(loss):
        return loss

    step.weight()  # not within the gradient function, where ranks would send it at another time
    return with_adjoint(tf.identity, lambda upstream: upstream * tf.cast(step.weight(), upstream.dtype), loss)


def gradient_of_means(gradient: Callable[[Any], Any], target: Any, sources: Any, output_gradients: Any) -> Any:
    """Returns the gradient of `target` by `sources`, as `tf.GradientTape.gradient` does.

    `gradient` calls it, with what it is given as `output_gradients`. The gradients of variables of the strategy, and of tensors
    that are computed of weights alone, are such that reductions, which multiply whole ones by the rank's weight, make of them the
    gradient that one device has. Those of inputs, and of what is computed of rows, are one device's as they are: they count the
    weight already.
    """
    step, program = trainer_step(), rank_program()
    if step is None or program is None:
        return gradient(output_gradients)
    variables = [_strategys_variable(source) for source in tf.nest.flatten(sources)]
    targets = tf.nest.flatten(target)
    if program.here() is None or not all(map(tf.is_tensor, targets)):
        return gradient(output_gradients)
    weights = program.attachment(GradientWeight)
    of_rows = [v is None and not is_of_weights(x, program) for v, x in zip(variables, tf.nest.flatten(sources), strict=True)]
    if all(of_rows):
        found = gradient(_of_rows(targets, step.weight(), program) if output_gradients is None else output_gradients)
        weights.note_of_rows(tf.nest.flatten(found))
        return found
    if weights.of_wholes() is None:
        return gradient(output_gradients)
    is_of_examples = tape.in_vectorized_map()  # whose gradients are a rank's own, and of which a mean may be taken behind it
    is_sharded = [v is not None and v.layout.is_data_sharded and not is_of_examples for v in variables]
    begins_with_weight = any(is_sharded) or _sends_gradients(program) or _is_not_linear(program)
    weight = step.weight()
    for loss in () if is_of_examples else targets:
        warn_of_step(step.model, program, loss)
    seeds = tf.nest.flatten(output_gradients) if output_gradients is not None else [None] * len(targets)
    with weights.beginning_with(weight if begins_with_weight else None):
        found = gradient([_seed(x, seed, weight, begins_with_weight) for x, seed in zip(targets, seeds, strict=True)])
    if not begins_with_weight and not any(of_rows):
        return found
    are_sums = any(_is_sum(x, program) for x in targets)
    flat = []
    for grad, is_of_rows, is_reduced in zip(tf.nest.flatten(found), of_rows, is_sharded, strict=True):
        if begins_with_weight and (are_sums if is_of_rows else not is_reduced):
            grad = _changed(grad, lambda x: tf.math.divide_no_nan(x, tf.cast(weight, x.dtype)))
        elif is_of_rows and not (begins_with_weight or are_sums):
            grad = _changed(grad, lambda x: x * tf.cast(weight, x.dtype))
        flat.append(grad)
    weights.note_of_rows([grad for grad, is_of_rows in zip(flat, of_rows, strict=True) if is_of_rows])
    return tf.nest.pack_sequence_as(found, flat)


def _of_rows(targets: Sequence[tf.Tensor], weight: tf.Tensor, program: RankProgram) -> list[tf.Tensor]:
    """Returns what a tape is to begin with at `targets` where gradients of rows are wanted: of a mean, what the rank counts."""
    whole = tf.ones_like(weight)
    begin = [whole if _is_over_rows(x) or _is_sum(x, program) else weight for x in targets]
    return [tf.cast(one, x.dtype) * tf.ones_like(x) for one, x in zip(begin, targets, strict=True)]


def _is_sum(x: tf.Tensor, program: RankProgram) -> bool:
    """Whether `x` is known to be a sum over rows, divided by a constant or not."""
    return tf.is_symbolic_tensor(x) and x.shape.rank == 0 and program.attachment(RowMeans).is_sum(x)


def _seed(target: tf.Tensor, given: Any, weight: tf.Tensor, begins_with_weight: bool) -> Any:
    """Returns what the tape is to begin with at `target`, where the user has `given` something, or None for 1."""
    weight = tf.cast(weight, target.dtype)
    given = tf.ones_like(target) if given is None else tf.cast(given, target.dtype)
    if _is_over_rows(target):  # TensorFlow differentiates the sum of its elements, which no rank's weight makes smaller
        factor = tf.ones_like(weight) if begins_with_weight else tf.math.divide_no_nan(tf.ones_like(weight), weight)
    elif begins_with_weight:
        factor = weight
    else:
        return given
    return factor * given


def _is_over_rows(x: tf.Tensor) -> bool:
    """Whether `x` has a value for each of the rank's rows, and so is no mean over them."""
    if x.shape.rank is None or x.shape.rank == 0:
        return False
    program = rank_program()
    return x.shape[0] is None or program is not None and has_rows(x, program)


def _sends_gradients(program: RankProgram) -> bool:
    """Whether something in this trace may send gradients to other data ranks: it has sent them what is no count of the losses."""
    ranks, counts = program.group_ranks("data"), ("loss/", "metrics")
    records = program.plan.records[program.rank]
    return any(record.ranks == ranks and not record.label.startswith(counts) for record in records)


def _is_not_linear(program: RankProgram) -> bool:
    """Whether the way back may not be linear in what it begins with, which must then be that of one device.

    It may not be through a `tf.custom_gradient`, nor in float16, whose numbers overflow. In an eager run nobody knows.
    """
    if program.is_eager or has_custom_gradients(program):
        return True
    return any(output.dtype == tf.float16 for op in program.graph.get_operations() for output in op.outputs)


def _strategys_variable(source: Any) -> Any:
    """Returns the variable of a tfdist strategy that `source`, of Keras or TensorFlow, is; None for anything else."""
    value = source if isinstance(source, tf.Variable) else getattr(source, "value", None)
    return value if hasattr(value, "layout") else None


def _changed(grad: Any, change: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(change(grad.values), grad.indices, grad.dense_shape)
    return change(grad)
