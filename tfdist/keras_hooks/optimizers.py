"""Optimizers: what every optimizer, `LossScaleOptimizer`, `Nadam` and the callback `SwapEMAWeights` do in a step."""

from collections.abc import Callable
from typing import Any

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfdist.keras_hooks.table import replaces
from tfdist.optimizers.application import apply
from tfdist.optimizers.given import accumulates_partial_sums
from tfdist.optimizers.loss_scaling import apply_unscaled, scale_loss
from tfdist.optimizers.outside_ranks import in_scope_of, stands_outside_ranks, step_of_all_ranks
from tfdist.optimizers.outside_scope import move_to_variables
from tfdist.optimizers.ownership import assign_owners, owner_of
from tfdist.optimizers.support import check_no_overwriting, check_overrides, check_variables
from tfdist.optimizers.target import variable_of
from tfdist.sharding import MeshConfig, config_of, placement
from tfdist.sharding.compression import COMPRESSION

_OPTIMIZER = "keras.src.optimizers.base_optimizer.BaseOptimizer"
_TF_OPTIMIZER = "keras.src.backend.tensorflow.optimizer.TFOptimizer"


def _config(optimizer: Any) -> MeshConfig | None:
    return config_of(getattr(optimizer, "_distribution_strategy", None))


@replaces(_TF_OPTIMIZER, "build")
def _build(original: Callable[..., None], self: Any, variables: Any) -> None:
    """Variables and optimizer must belong to one strategy, and Keras does not look. An optimizer that looks at whole tensors
    needs an owner for each before it makes its state."""
    move_to_variables(self, variables)
    config = _config(self)
    if config is not None or any(config_of(getattr(variable_of(v), "distribute_strategy", None)) for v in variables):
        check_variables(self, variables, self._distribution_strategy)
    if config is not None:
        check_overrides(self)
        check_no_overwriting(self, variables)
    original(self, variables)  # averages and accumulators: elementwise, whatever the optimizer
    if config is not None:
        assign_owners(self, variables, config)
        inner = getattr(self, "inner_optimizer", self)
        steppers = getattr(inner, "optimizers", [inner])
        COMPRESSION.now.keep_state(self, variables, config, any(accumulates_partial_sums(one, config) for one in steppers))
        self._distribution_strategy.extended.optimizers.setdefault(self, 0)


@replaces("keras.optimizers.Nadam", "build")
def _build_in_scope(original: Callable[..., None], self: Any, var_list: Any) -> None:
    """It makes a scalar that is trainable, as by default: it would be taken for a layer's weight."""
    with placement(is_replicated=True):
        original(self, var_list)


@replaces(_TF_OPTIMIZER, "add_variable_from_reference")
def _add_variable_from_reference(
    original: Callable[..., Any], self: Any, reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
) -> Any:
    """The state of a whole-tensor optimizer lives whole on one rank, and in stages 0 and 1 a gradient accumulator holds each
    rank's own sum; Keras makes both like the weight."""
    config = _config(self)
    if config is None:
        return original(self, reference_variable, name=name, initializer=initializer)
    is_partial = name == "gradient_accumulator" and accumulates_partial_sums(self, config)
    parameter = getattr(variable_of(reference_variable), "layout", None)
    owner = owner_of(self, reference_variable)
    with in_scope_of(self), placement(slot_of=parameter, is_partial=is_partial, data_owner=owner):
        return original(self, reference_variable, name=name, initializer=initializer)


@replaces(
    _OPTIMIZER,
    "add_variable",
    signature="(self, shape, initializer='zeros', dtype=None, aggregation='none', layout=None, name=None)",
)
def _add_variable(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Keras makes the state of an optimizer that is built outside `scope()` under no strategy."""
    with in_scope_of(self):
        return original(self, *args, **kwargs)


@replaces(_OPTIMIZER, "apply")
def _apply(original: Callable[..., None], self: Any, grads: Any, trainable_variables: Any = None) -> None:
    """Keras clips, accumulates and averages each rank's own gradients, before they are reduced; outside replicas it fails."""
    move_to_variables(self, trainable_variables or ())
    config = _config(self)
    # A rank may store no weight at all, and still takes part in a norm and counts the step.
    if config is None or not len(grads) and not config.mesh.splits_layers:
        original(self, grads, trainable_variables)
    elif stands_outside_ranks():
        step_of_all_ranks(self, grads, trainable_variables, config, apply)
    else:
        apply(self, grads, trainable_variables, config)


@replaces(_OPTIMIZER, "apply_gradients")
def _apply_gradients(original: Callable[..., Any], self: Any, grads_and_vars: Any) -> Any:
    """Keras cannot do without pairs; of a rank whose stages are frozen there are none, and it still takes part and counts."""
    config = _config(self)
    pairs = list(grads_and_vars)
    if pairs or config is None or not config.mesh.splits_layers:
        return original(self, pairs)
    self.apply([], [])
    return self._iterations


@replaces(_TF_OPTIMIZER, "_apply_weight_decay")
def _apply_weight_decay(original: Callable[..., None], self: Any, variables: Any) -> None:
    """Keras decays the whole variables; a rank decays what it steps on."""
    (original if _config(self) is None else BaseOptimizer._apply_weight_decay)(self, variables)


@replaces(_TF_OPTIMIZER, "_backend_update_step")
def _backend_update_step(
    original: Callable[..., None], self: Any, grads: Any, trainable_variables: Any, learning_rate: Any
) -> None:
    """Keras sums the gradients over the ranks and updates whole variables; a rank updates its shards and publishes them."""
    if _config(self) is None:
        original(self, grads, trainable_variables, learning_rate)
    else:
        grads.take(learning_rate)  # the step that `optimizers.step` has given


@replaces(_TF_OPTIMIZER, "_overwrite_model_variables_with_average_value")
def _overwrite_with_average(original: Callable[..., None], self: Any, trainable_variables: Any) -> None:
    """Keras copies each rank's average into its weight; weights and averages may be sharded differently."""
    function = original if _config(self) is None else BaseOptimizer._overwrite_model_variables_with_average_value
    function(self, trainable_variables)


@replaces("keras.callbacks.SwapEMAWeights", "_tf_swap_variables")
def _swap(original: Callable[..., None], self: Any, optimizer: Any) -> None:
    """Keras swaps each rank's average and weight; they may be sharded differently."""
    (original if _config(optimizer) is None else type(self)._backend_swap_variables)(self, optimizer)


@replaces("keras.callbacks.SwapEMAWeights", "_tf_finalize_ema_values")
def _finalize_averages(original: Callable[..., None], self: Any, optimizer: Any) -> None:
    """Keras copies each rank's average into its weight; they may be sharded differently."""
    (original if _config(optimizer) is None else type(self)._backend_finalize_ema_values)(self, optimizer)


@replaces("keras.optimizers.LossScaleOptimizer", "_tf_apply")
def _loss_scaled_apply(original: Callable[..., None], self: Any, grads: Any, trainable_variables: Any = None) -> None:
    """Each rank would decide for itself whether its gradients have overflowed, and the ranks would part."""
    config = _config(self)
    if config is None:
        original(self, grads, trainable_variables)
        return
    if stands_outside_ranks():
        step_of_all_ranks(self, grads, trainable_variables, config, apply_unscaled)
        return
    # The scope says that an optimizer assigns the scale: it is no statistic of a layer.
    with keras.name_scope(self.name, caller=self):
        apply_unscaled(self, grads, trainable_variables, config)


@replaces("keras.optimizers.LossScaleOptimizer", "scale_loss")
def _scale_loss(original: Callable[..., Any], self: Any, loss: Any) -> Any:
    """Before the optimizer is built Keras takes the initial scale, a constant, and a rank's function is traced once."""
    return original(self, loss) if _config(self) is None else scale_loss(original, self, loss)
