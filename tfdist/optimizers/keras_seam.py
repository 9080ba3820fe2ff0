"""Where Keras assumes mirrored variables, and has no hook: the few methods that tfdist overrides.

Every override looks at the strategy first and falls through, untouched, for all but tfdist's. The names are private to Keras:
tests/test_private_names.py fails when they change.

    TFOptimizer.build                  the variables must belong to the optimizer's strategy; owners for whole-tensor optimizers
    Nadam.build                        makes a scalar that is "trainable": the scope says that an optimizer makes it
    TFOptimizer.add_variable_from_reference   accumulators of stages 0 and 1 hold each rank's own sum
    BaseOptimizer.apply                Keras clips, accumulates and averages what is not reduced yet
    TFOptimizer._apply_weight_decay    on what this rank steps, instead of the full variable
    TFOptimizer._backend_update_step   step on what this rank holds, publish
    TFOptimizer._overwrite_model_variables_with_average_value   weights and averages may be cut differently
    SwapEMAWeights._tf_swap_variables, _tf_finalize_ema_values  the same
    LossScaleOptimizer._tf_apply       all ranks must agree on overflow
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfdist import errors
from tfdist.optimizers.loss_scaling import apply_unscaled
from tfdist.optimizers.ownership import assign_owners
from tfdist.optimizers.step import accumulates_partial_sums, apply_gradients, update_step
from tfdist.optimizers.support import check_no_overwriting, check_variables, is_elementwise
from tfdist.optimizers.variables import layout_of, variable_of
from tfdist.override import override
from tfdist.sharding import MeshConfig, Shard, config_of


def _config(optimizer: Any) -> MeshConfig | None:
    return config_of(getattr(optimizer, "_distribution_strategy", None))


@override("build", TFOptimizer)
def _build(original: Callable[..., None], self: Any, variables: Any) -> None:
    config = _config(self)
    if config is None:
        if any(config_of(getattr(variable_of(variable), "distribute_strategy", None)) for variable in variables):
            check_variables(self, variables, self._distribution_strategy)
        original(self, variables)
        return
    check_variables(self, variables, self._distribution_strategy)
    check_no_overwriting(self, variables)
    original(self, variables)  # averages and accumulators: elementwise, whatever the optimizer
    is_wrapper = isinstance(self, keras.optimizers.LossScaleOptimizer | keras.optimizers.MultiOptimizer)
    if is_elementwise(self) or is_wrapper:
        return
    if not isinstance(config.placements.optimizer_state, Shard):
        # Ranks that hold a variable whole may step on it; what is cut over the tensor axis needs an owner to be whole.
        variables = [v for v in variables if layout_of(variable_of(v), config).is_tensor_sharded]
    assign_owners(self, variables, config.mesh.data_parallel_size)


@override("build", keras.optimizers.Nadam)
def _build_in_scope(original: Callable[..., None], self: Any, var_list: Any) -> None:
    with keras.name_scope(self.name, caller=self):
        original(self, var_list)


@override("add_variable_from_reference", TFOptimizer)
def _add_variable_from_reference(
    original: Callable[..., Any], self: Any, reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
) -> Any:
    config = _config(self)
    if config is None or name != "gradient_accumulator" or not accumulates_partial_sums(self, config):
        return original(self, reference_variable, name=name, initializer=initializer)
    with self._distribution_strategy.extended.summed_on_read():
        return original(self, reference_variable, name=name, initializer=initializer)


@override("apply", BaseOptimizer)
def _apply(original: Callable[..., None], self: Any, grads: Any, trainable_variables: Any = None) -> None:
    config = _config(self)
    # A rank of a pipeline may have no weights, and still takes part in a norm and counts the step.
    has_some = len(grads) or config is not None and config.mesh.pipeline_parallel_size > 1
    if config is None or not has_some:
        original(self, grads, trainable_variables)
        return
    with keras.name_scope(self.name, caller=self):
        if not self.built and trainable_variables is not None:
            if config.mesh.pipeline_parallel_size > 1:
                raise RuntimeError(
                    errors.message(
                        "With a pipeline an optimizer must be built before the first step, on the weights of all stages.",
                        optimizer=type(self).__name__,
                        fix="Call `optimizer.build(model.trainable_variables)` in `strategy.scope()`.",
                    )
                )
            self.build(list(trainable_variables))
        if trainable_variables is None and len(grads) != len(self._trainable_variables):
            raise ValueError(
                errors.message(
                    f"`grads` must have one gradient for each of the {len(self._trainable_variables)} variables that "
                    f"{type(self).__name__} was built with.",
                    grads=f"{len(grads)} gradients",
                    fix="Pass the variables too: `optimizer.apply(grads, trainable_variables)`.",
                )
            )
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        self._check_variables_are_known(variables)
        if grads:
            grads, variables = self._filter_empty_gradients(grads, variables)
        apply_gradients(self, grads, variables, config)
    self._iterations.assign_add(1)


@override("_apply_weight_decay", TFOptimizer)
def _apply_weight_decay(original: Callable[..., None], self: Any, variables: Any) -> None:
    if _config(self) is None:
        original(self, variables)
        return
    for variable in variables if self.weight_decay is not None else ():
        if self._use_weight_decay(variable):
            rate = tf.cast(self.learning_rate, variable.dtype)
            variable.assign_sub(variable * tf.cast(self.weight_decay, variable.dtype) * rate)


@override("_backend_update_step", TFOptimizer)
def _backend_update_step(
    original: Callable[..., None], self: Any, grads: Any, trainable_variables: Any, learning_rate: Any
) -> None:
    config = _config(self)
    if config is None:
        original(self, grads, trainable_variables, learning_rate)
    else:
        update_step(self, grads, learning_rate, config)


@override("_overwrite_model_variables_with_average_value", TFOptimizer)
def _overwrite_with_average(original: Callable[..., None], self: Any, trainable_variables: Any) -> None:
    if _config(self) is None:
        original(self, trainable_variables)
        return
    # Outside replicas, when training is over: one variable at a time is whole.
    for variable, average in zip(trainable_variables, self._model_variables_moving_average, strict=True):
        if average is not None:
            variable_of(variable).assign(variable_of(average).read_value())


@override("_tf_swap_variables", keras.callbacks.SwapEMAWeights)
def _swap(original: Callable[..., None], self: Any, optimizer: Any) -> None:
    if _config(optimizer) is None:
        original(self, optimizer)
    else:
        self._backend_swap_variables(optimizer)


@override("_tf_finalize_ema_values", keras.callbacks.SwapEMAWeights)
def _finalize_averages(original: Callable[..., None], self: Any, optimizer: Any) -> None:
    if _config(optimizer) is None:
        original(self, optimizer)
    else:
        self._backend_finalize_ema_values(optimizer)


@override("_tf_apply", keras.optimizers.LossScaleOptimizer)
def _loss_scaled_apply(original: Callable[..., None], self: Any, grads: Any, trainable_variables: Any = None) -> None:
    config = _config(self)
    if config is None:
        original(self, grads, trainable_variables)
        return
    # The scope says that an optimizer assigns the scale: it is no statistic of a layer.
    with keras.name_scope(self.name, caller=self):
        apply_unscaled(self, grads, trainable_variables, config)
