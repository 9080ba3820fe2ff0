"""What the sharded optimizer step can do exactly, and the refusal of what it cannot do yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.sharding import Shard, ShardingConfig

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
}

_KERAS_OWN = frozenset(_ELEMENTWISE)

_NOT_YET = {
    "clipnorm": "it must act on the reduced gradient, and Keras clips before the reduction",
    "clipvalue": "it must act on the reduced gradient, and Keras clips before the reduction",
    "global_clipnorm": "the norm must be summed over all ranks, and Keras takes each rank's own",
    "use_ema": "the averages are not sharded yet",
    "gradient_accumulation_steps": "the accumulators are not sharded yet",
    "loss_scale_factor": "the ranks must agree on overflow first",
}


def elementwise(optimizer_class: type) -> type:
    """Declares that an optimizer's `update_step` is elementwise, so that it may run on flat shards. A class decorator.

    Elementwise means: each element of the new parameter and of the new slots depends on the same element of the gradient, the
    parameter and the slots, and on scalars. Adam is; an optimizer that takes a norm or factors a matrix (Lamb, Adafactor,
    Muon) is not, and would compute something else on shards.

    Args:
        optimizer_class: a subclass of `keras.optimizers.Optimizer`. The declaration holds for this class only, not for its
            subclasses.

    Returns:
        `optimizer_class`.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, keras.optimizers.Optimizer)):
        raise ValueError(
            errors.message(
                "`optimizer_class` must be a subclass of `keras.optimizers.Optimizer`.", optimizer_class=optimizer_class
            )
        )
    _ELEMENTWISE.add(optimizer_class)
    return optimizer_class


def may_share(optimizer: Any) -> bool:
    """Whether one traced update serves all parameters of a shape: Keras's own classes look at nothing else of a parameter."""
    return type(optimizer) in _KERAS_OWN


def check_supported(optimizer: Any, config: ShardingConfig) -> None:
    """Raises NotImplementedError when `optimizer` would not compute under `config` what one device computes."""
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise NotImplementedError(
            errors.message(
                "`LossScaleOptimizer` (also as added by the mixed_float16 policy) is not supported yet: its decision to skip a "
                "step must be agreed by all ranks.",
                optimizer=name,
                fix="Use the mixed_bfloat16 policy, or `auto_scale_loss=False` in `compile`.",
            )
        )
    for argument, reason in _NOT_YET.items():
        value = getattr(optimizer, argument, None)
        if value:
            raise NotImplementedError(
                errors.message(
                    f"`{argument}` of {name} is not supported yet under a tfdist strategy: {reason}.",
                    fix=f"Leave `{argument}` unset.",
                    **{argument: value},
                )
            )
    # The abstract base class cannot step; Keras makes one to learn its attributes while it loads a model.
    is_abstract = type(optimizer) is keras.optimizers.Optimizer
    if isinstance(config.placements.optimizer_state, Shard) and not is_abstract and type(optimizer) not in _ELEMENTWISE:
        known = sorted(cls.__name__ for cls in _ELEMENTWISE)
        raise NotImplementedError(
            errors.message(
                f"`{name}` cannot run on shards with `zero_stage={config.zero_stage}`: only optimizers that are known to be "
                f"elementwise can, {known}.",
                optimizer=name,
                fix="Use one of these, or `zero_stage=0`; declare an elementwise optimizer of your own with "
                "`@tfdist.optimizers.elementwise`.",
            )
        )


def check_variables(optimizer: Any, variables: Sequence[Any], strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError when a variable to train was not made under `strategy`, the optimizer's."""
    for variable in variables:
        value = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)
        made_by = getattr(value, "distribute_strategy", None)
        if made_by is not strategy:
            raise ValueError(
                errors.message(
                    f"The optimizer was made under {describe(strategy)}, but variable "
                    f"{getattr(variable, 'path', value.name)!r} under {describe(made_by)}.",
                    optimizer=type(optimizer).__name__,
                    fix="Build the model, its layers and the optimizer (or call `compile`) inside one `strategy.scope()`.",
                )
            )


def describe(strategy: tf.distribute.Strategy | None) -> str:
    """Names a strategy for an error message."""
    if strategy is None or type(strategy).__name__ == "_DefaultDistributionStrategy":
        return "no strategy"
    return f"{type(strategy).__name__} at {id(strategy):#x}"
