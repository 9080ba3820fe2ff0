"""An optimizer's step outside `strategy.run`: the eager or traced loop of a tutorial, a policy between two episodes, Reptile.

The gradients are whole there, and one for all ranks. They go to the ranks as what they sum up to: the first data rank has them,
the others have zeros. So every rank takes its part of an ordinary step, with all that an optimizer may be asked for. It costs the
reduction of an ordinary step, and outside any `tf.function` the call of a traced one.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import Where, current_program, where
from tfdist.optimizers.target import variable_of
from tfdist.sharding import MeshConfig, config_of, packing

_traced: weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., None]]] = weakref.WeakKeyDictionary()


def stands_outside_ranks() -> bool:
    """Whether no rank computes here: neither in the function given to `strategy.run`, nor in an update of one component."""
    return where() in (Where.CROSS_REPLICA, Where.NO_RANK)


def in_scope_of(optimizer: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns the scope of the tfdist strategy that `optimizer` was made under, where the caller stands outside it."""
    strategy = getattr(optimizer, "_distribution_strategy", None)
    is_missing = config_of(strategy) is not None and tf.distribute.get_strategy() is not strategy
    return strategy.scope() if strategy is not None and is_missing else contextlib.nullcontext()


def step_of_all_ranks(
    optimizer: Any, grads: Sequence[Any], variables: Sequence[Any] | None, config: MeshConfig, step: Callable[..., None]
) -> None:
    """Lets every rank take its part of a step of `optimizer` with whole `grads`: `step(optimizer, grads, variables, config)`.

    A gradient that has one value for each replica is summed over them. Builds the optimizer if it must.

    Raises:
        ValueError: there are not as many gradients as variables.
    """
    strategy = optimizer._distribution_strategy
    variables = list(optimizer._trainable_variables if variables is None else variables)
    if not optimizer.built:
        with strategy.scope():
            optimizer.build(variables)
    pairs = [(grad, variable) for grad, variable in zip(grads, variables, strict=True) if grad is not None]
    found = [grad if isinstance(grad, tf.distribute.DistributedValues) else tf.convert_to_tensor(grad) for grad, _ in pairs]
    mine = [variable for _, variable in pairs]
    is_whole = tuple(not isinstance(grad, tf.distribute.DistributedValues) for grad in found)
    if tf.executing_eagerly():
        key = (step, is_whole, *(variable_of(variable)._unique_id for variable in mine))
        functions = _traced.setdefault(optimizer, {})
        if key not in functions:
            functions[key] = tf.function(_for_all_ranks(weakref.ref(optimizer), mine, is_whole, config, step), autograph=False)
        functions[key](found)
    else:
        _for_all_ranks(lambda: optimizer, mine, is_whole, config, step)(found)


def _for_all_ranks(
    optimizer: Callable[[], Any],
    variables: Sequence[Any],
    is_whole: Sequence[bool],
    config: MeshConfig,
    step: Callable[..., None],
) -> Callable[[Sequence[Any]], None]:
    held_variables = [weakref.ref(variable) for variable in variables]  # what an optimizer keeps does not keep what it trains

    @tf.autograph.experimental.do_not_convert
    def on_rank(grads: Sequence[Any]) -> None:
        program = current_program("`optimizer.apply`")
        coordinate = program.mesh.coordinate(program.rank)
        summands, stored = [], []
        for grad, variable, whole in zip(grads, (held() for held in held_variables), is_whole, strict=True):
            layout = variable_of(variable).layout
            if layout.pipe_owners is not None and coordinate.pipe not in layout.pipe_owners:
                continue
            if whole:
                grad = packing.tensor_shard(grad, layout, coordinate)
                grad = grad if coordinate.data == 0 else tf.zeros_like(grad)
            summands.append(grad)
            stored.append(variable)
        step(optimizer(), summands, stored, config)

    return lambda grads: optimizer()._distribution_strategy.run(on_rank, args=(grads,))
