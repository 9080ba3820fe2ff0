"""Losses: a rank's loss is its share of the mean over the global batch, instead of the mean over its own part."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.collectives import rank_program
from tfdist.keras_hooks.table import TENSORFLOW_TRAINER, TRAINER, replaces
from tfdist.keras_layers.in_stages import InStages
from tfdist.losses.global_losses import (
    MEANS,
    is_own_mean,
    is_shared,
    own_mean,
    reduce_sum,
    reduce_weighted_values,
    scale_loss,
    unscale_loss,
)
from tfdist.losses.sliced_batch import is_on_trial
from tfdist.losses.step_gradients import gradient_of_targets, is_of_weights, weighted_in_gradient
from tfdist.losses.trainer_step import eager_losses, of_trainer, trainer_step
from tfdist.losses.undivided_batch import is_given_everywhere
from tfdist.optimizers.application import noted
from tfdist.placements.facts import have_met
from tfdist.placements.redistribute import Redistribution
from tfdist.placements.repair import meant_of_own_rows
from tfdist.sharding import UnshardSchedule, config_of
from tfdist.sharding.gradient_weight import GradientWeight

_MODULE = "keras.src.losses.loss"


def steps_of(model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `step`, the `train_step` or `test_step` of `model`, as one whose losses are a rank's own means.

    With `step_losses="sum"` a step of the user's computes shares, where ranks have rows of their own. So does a pipeline's,
    microbatch by microbatch.
    """
    kerass = (keras.Model.train_step, keras.Model.test_step)
    is_keras_own = getattr(step, "__func__", step) in kerass and _computes_as_keras(model)
    if isinstance(model, InStages):
        return step
    with_means = of_trainer(model, step, is_keras_own)
    if is_keras_own or config_of(model._distribute_strategy).step_losses != "sum":
        return with_means
    return lambda data: (with_means if is_given_everywhere() else step)(data)


def _computes_as_keras(model: Any) -> bool:
    """Whether the loss of `model` is what it was compiled with and what its layers add."""
    return type(model).compute_loss is keras.Model.compute_loss


@replaces(_MODULE, "reduce_weighted_values")
def _reduce_weighted_values(
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """Keras takes a mean of the ranks' means, which is not the mean of the batch when its parts differ in size or weight."""
    is_sum = reduction == "sum"
    if is_on_trial() and (is_sum or reduction in MEANS):  # whatever is left out or weighted, slices count what they should
        return tf.reduce_mean(original(values, sample_weight=sample_weight, mask=mask, reduction=None, dtype=dtype))
    if not is_shared() or not (is_sum or reduction in MEANS):
        return original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    if is_sum:
        return reduce_sum(original(values, sample_weight=sample_weight, mask=mask, reduction=None, dtype=dtype))
    return reduce_weighted_values(values, sample_weight, mask, reduction, dtype)


@replaces(_MODULE, "scale_loss_for_distribution")
def _scale_loss(original: Callable[..., Any], value: Any) -> Any:
    """Keras divides every loss by the number of ranks, also one that is a share already, and one that no rank computes."""
    return scale_loss(value) if is_shared() or config_of(tf.distribute.get_strategy()) is not None else original(value)


@replaces(_MODULE, "unscale_loss_for_distribution")
def _unscale_loss(original: Callable[..., Any], value: Any) -> Any:
    """Keras logs a rank's loss times the number of ranks; what is wanted is the sum of the ranks' shares."""
    return unscale_loss(value) if is_shared() or config_of(tf.distribute.get_strategy()) is not None else original(value)


@replaces("tensorflow.nn", "compute_average_loss")
def _compute_average_loss(
    original: Callable[..., Any], per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> Any:
    """In a step of Keras's trainer a rank's loss is its own mean; TensorFlow gives its part of a sum over the ranks."""
    if not is_own_mean():
        return original(per_example_loss, sample_weight=sample_weight, global_batch_size=global_batch_size)
    size = tf.shape(per_example_loss)[0] if global_batch_size is None else global_batch_size
    return own_mean(original(per_example_loss, sample_weight, size), is_over_batch=global_batch_size is not None)


@replaces("tensorflow.nn", "scale_regularization_loss")
def _scale_regularization_loss(original: Callable[..., Any], regularization_loss: Any) -> Any:
    """In a step of Keras's trainer a penalty of weights counts as it is; TensorFlow divides it by the number of ranks."""
    return tf.reduce_sum(regularization_loss) if is_own_mean() else original(regularization_loss)


@replaces("keras.layers.Layer", "add_loss")
def _add_loss(original: Callable[..., None], self: Any, loss: Any) -> None:
    """Eager ranks take turns, and would find each other's losses in a layer's list."""
    before = len(self._losses)
    original(self, loss)
    own = eager_losses(self)
    if own is not None:
        own.extend(self._losses[before:])
        del self._losses[before:]


@replaces("keras.layers.Layer", "_get_own_losses")
def _get_own_losses(original: Callable[..., list[Any]], self: Any) -> list[Any]:
    """Eager ranks take turns, and would find each other's losses in a layer's list."""
    return [*original(self), *(eager_losses(self) or ())]


@replaces("keras.layers.Layer", "_clear_losses")
def _clear_losses(original: Callable[..., None], self: Any) -> None:
    """Eager ranks take turns, and would drop each other's losses from a layer's list."""
    own = eager_losses(self)
    if own is not None:
        own.clear()
    original(self)


@replaces(TENSORFLOW_TRAINER, "train_step")
def _train_step(original: Callable[..., Any], self: Any, data: Any) -> Any:
    """Keras sums the gradients of the ranks; a rank's weight enters them with the loss, for nothing."""
    program = None if config_of(self._distribute_strategy) is None or trainer_step() is None else rank_program()
    if program is None or not _computes_as_keras(self):
        return original(self, data)
    with program.part(GradientWeight).entered_with_the_loss():
        return original(self, data)


@replaces(TRAINER, "_compute_loss", signature="(self, x=None, y=None, y_pred=None, sample_weight=None, training=True)")
def _compute_loss(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The loss that Keras differentiates is a rank's own mean; its gradient must count what the rank has of the batch."""
    loss = original(self, *args, **kwargs)
    program = rank_program()
    weight: GradientWeight | None = None if program is None else program.part(GradientWeight)
    if weight is None or not weight.is_in_loss:
        return loss
    # A penalty of weights times a mean, in a loss or a layer: without rows its derivative is 0 times the mean of nothing.
    weight.has_numbers |= any(layer._get_own_losses() for layer in self._flatten_layers())
    weight.has_numbers |= not program.is_eager and program.part(Redistribution).bears_gradients
    return weighted_in_gradient(loss)


@replaces("tensorflow.GradientTape", "gradient")
def _gradient(
    original: Callable[..., Any],
    self: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """In a custom `train_step` the gradient is that of a rank's own mean, and must count what the rank has of the batch.
    What reads it before an optimizer does must read the sum over the ranks."""

    def gradient(targets: Any, seeds: Any) -> Any:
        try:
            return original(self, targets, sources, seeds, unconnected_gradients)
        except (AttributeError, LookupError) as error:
            branch_points = () if program is None else program.root.branch_points.values()
            is_of_branch = "No gradient defined" in str(error) or "Tensor.graph is undefined" in str(error)
            if not is_of_branch or not any(one.has_sent and one.is_recorded for one in branch_points):
                raise
            raise errors.not_implemented(
                "A tape goes back through a branch (`tf.cond`) in which the ranks have sent something, such as gradients of "
                "weights, the statistics of a synchronized BatchNormalization, or the sum of a Keras loss's weights.",
                fix="Compute it before the branch, and choose in that; or open the tape in it, with the optimizer's step.",
            ) from error

    program = rank_program()
    if program is None:
        return gradient(target, output_gradients)
    weight = program.part(GradientWeight)
    with weight.of_gradient():
        if weight.is_nested:
            return gradient(target, output_gradients)
        return noted(gradient_of_targets(self, gradient, target, sources, output_gradients), sources, is_of_weights)


@replaces(
    "tensorflow.GradientTape",
    "jacobian",
    signature="(self, target, sources, unconnected_gradients=<UnconnectedGradients.NONE: 'none'>, parallel_iterations=None, "
    "experimental_use_pfor=True)",
)
def _jacobian(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A Jacobian is of a rank's own rows. In an eager run it is a gradient for each of them, which at stage 3 would be summed."""
    program = rank_program()
    is_eager = program is not None and program.is_eager
    with program.part(UnshardSchedule).own_gradients() if is_eager else contextlib.nullcontext():
        return original(self, *args, **kwargs)


@replaces("tensorflow.GradientTape", "batch_jacobian")
def _batch_jacobian(
    original: Callable[..., Any],
    self: Any,
    target: Any,
    source: Any,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    parallel_iterations: Any = None,
    experimental_use_pfor: bool = True,
) -> Any:
    """Of each row. TensorFlow divides a size by a number of rows, perhaps none, to find the number of columns, which is known."""
    columns, others, program = target.shape[1:], source.shape[1:], rank_program()
    are_rows = columns.rank and others.rank and target.shape[:1].is_compatible_with(source.shape[:1])  # else TensorFlow raises
    number = columns.num_elements() if are_rows and others.is_fully_defined() else None
    if program is None or not tf.is_symbolic_tensor(target) or not number or not experimental_use_pfor:
        return original(self, target, source, unconnected_gradients, parallel_iterations, experimental_use_pfor)

    def of_column(seed: tf.Tensor) -> tf.Tensor:
        return self.gradient(target, source, tf.ones_like(target) * seed, tf.UnconnectedGradients.ZERO)

    with meant_of_own_rows(program, like=source) as found:
        seeds = tf.reshape(tf.eye(number, dtype=target.dtype), [number, *columns])
        of_columns = tf.vectorized_map(of_column, seeds, fallback_to_while_loop=False)
        found.append(tf.reshape(tf.experimental.numpy.moveaxis(of_columns, 0, 1), [-1, *columns, *others]))
    return found[0]


@replaces(
    "tensorflow.nn",
    "ctc_loss",
    signature="(labels, logits, label_length, logit_length, logits_time_major=True, unique=None, blank_index=None, name=None)",
)
def _ctc_loss(
    original: Callable[..., Any], labels: Any, logits: Any, label_length: Any, logit_length: Any, *args: Any, **kw: Any
) -> Any:
    """Of each row, which its loops do not tell."""
    program = None if have_met(logits) else rank_program(peers_on="data")
    with meant_of_own_rows(program, like=logit_length) as found:
        found.append(original(labels, logits, label_length, logit_length, *args, **kw))
    return found[0]
