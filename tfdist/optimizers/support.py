"""Which optimizers may run on flat shards, and the refusal of what cannot be done exactly."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors

_ELEMENTWISE: set[type] = {
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    keras.optimizers.ScheduleFreeAdamW,
}

_KERAS_OWN = frozenset(_ELEMENTWISE)


def elementwise(optimizer_class: type) -> type:
    """Declares that an optimizer's `update_step` is elementwise, so that it may run on flat shards. A class decorator.

    Elementwise means: each element of the new parameter and of the new slots depends on the same element of the gradient, the
    parameter and the slots, and on scalars. Adam is; an optimizer that takes a norm or factors a matrix (Lamb, Adafactor,
    Muon) is not, and would compute something else on shards. An optimizer that is not declared runs whole-variable instead:
    exact as well, with each parameter's state on one rank, and with more traffic.

    Args:
        optimizer_class: a subclass of `keras.optimizers.Optimizer`. The declaration holds for this class only, not for its
            subclasses.

    Returns:
        `optimizer_class`.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, keras.optimizers.Optimizer)):
        raise errors.value_error(
            "`optimizer_class` must be a subclass of `keras.optimizers.Optimizer`.", optimizer_class=optimizer_class
        )
    _ELEMENTWISE.add(optimizer_class)
    return optimizer_class


def may_share(optimizer: Any) -> bool:
    """Whether one update serves several parameters: Keras's own classes look at nothing of one but its elements."""
    return type(optimizer) in _KERAS_OWN


def is_wrapper(optimizer: Any) -> bool:
    """Whether `optimizer` lets others step, which are built by themselves."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer | keras.optimizers.MultiOptimizer)


def is_elementwise(optimizer: Any) -> bool:
    """Whether `optimizer` may run on flat shards."""
    return type(optimizer) in _ELEMENTWISE


def changes_gradients(optimizer: Any) -> bool:
    """Whether the class of `optimizer` has a method of its own that is given all gradients: it may look at them whole."""
    return any(not _is_of_keras(optimizer, method) for method in ("apply", "apply_gradients"))


def _is_of_keras(optimizer: Any, method: str) -> bool:
    return getattr(type(optimizer), method).__module__.partition(".")[0] == "keras"


def check_overrides(optimizer: Any) -> None:
    """Raises NotImplementedError for an optimizer that overrides a private method of Keras's that is not called here."""
    for method in ("_clip_gradients", "_backend_apply_gradients"):
        if not _is_of_keras(optimizer, method):
            raise errors.not_implemented(
                f"{type(optimizer).__name__} overrides `{method}`, which is not called under a tfdist strategy: gradients are "
                "clipped, accumulated and applied when they have been reduced, shard by shard.",
                optimizer=type(optimizer).__name__,
                fix="Override `apply(grads, trainable_variables)`, change the gradients there and call `super().apply`.",
            )


def check_no_overwriting(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raises NotImplementedError for variables that Keras overwrites with their gradient (the scales of float8 training)."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise errors.not_implemented(
                f"Variable {variable.path!r} is overwritten with its gradient (float8 training), which is not supported "
                "under a tfdist strategy.",
                optimizer=type(optimizer).__name__,
                fix='Use the "mixed_bfloat16" policy instead of float8 quantization.',
            )


def check_variables(optimizer: Any, variables: Sequence[Any], strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError when a variable to train was not made under `strategy`, the optimizer's."""
    for variable in variables:
        value = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)
        made_by = getattr(value, "distribute_strategy", None)
        if made_by is not strategy:
            raise errors.value_error(
                f"The optimizer was made under {describe(strategy)}, but variable "
                f"{getattr(variable, 'path', value.name)!r} under {describe(made_by)}.",
                optimizer=type(optimizer).__name__,
                fix="Build the model, its layers and the optimizer (or call `compile`) inside one `strategy.scope()`.",
            )


def describe(strategy: tf.distribute.Strategy | None) -> str:
    """Names a strategy for an error message."""
    if is_none(strategy):
        return "no strategy"
    return f"{type(strategy).__name__} at {id(strategy):#x}"


def is_none(strategy: tf.distribute.Strategy | None) -> bool:
    """Whether `strategy` stands for none: TensorFlow has a default one, for code that is in no scope."""
    return strategy is None or type(strategy).__name__ == "_DefaultDistributionStrategy"
