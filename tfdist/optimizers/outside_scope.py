"""An optimizer that was made outside `strategy.scope()` for a model that was made inside it.

    with strategy.scope():
        model = build_model()
    model.compile(keras.optimizers.Adam(1e-3), "mse")        made before `compile` is called, in no scope

As long as it has done nothing yet it is moved under the model's strategy.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.optimizers.support import is_none
from tfdist.optimizers.target import variable_of
from tfdist.sharding import config_of
from tfdist.sharding.separate_thread import move


def move_optimizer(optimizer: Any, strategy: tf.distribute.Strategy) -> None:
    """Moves an optimizer that was made in no scope, and is not built yet, under `strategy`; every other one stays as it is."""
    if optimizer.built or not is_none(optimizer._distribution_strategy):
        return
    move(optimizer.variables, strategy)
    optimizer._distribution_strategy = strategy
    for part in [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "_inner_optimizers", ())]:
        if part is not None:
            move_optimizer(part, strategy)


def move_to_variables(optimizer: Any, variables: Sequence[Any]) -> None:
    """Moves an optimizer that was made in no scope, and is not built yet, under the tfdist strategy that all `variables` have."""
    strategies = {getattr(variable_of(variable), "distribute_strategy", None) for variable in variables}
    if len(strategies) == 1 and config_of(strategy := strategies.pop()) is not None:
        move_optimizer(optimizer, strategy)
