"""Weights that are made when it is known which ranks of a pipeline use them.

Under a strategy with a pipeline a layer's weights are not made where the layer is built: nobody knows yet in which stage the
layer will be, and a rank of another stage must never hold its weights. A deferred weight keeps its initializer until `make_on`
makes the weight.

`_value` and `_initializer` are private to Keras: test_private_names_of_pipeline.py fails when they change.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors, temporary
from tfdist.collectives import rank_program
from tfdist.mesh import current_mesh
from tfdist.sharding import kept_placement, keras_scope, request_placement
from tfdist.sharding.deferral import DEFERRAL, NoDeferral


def make_on(pipe_ranks: Sequence[int], variable: keras.Variable, strategy: tf.distribute.Strategy) -> None:
    """Makes a layer's weight on the ranks at the coordinates `pipe_ranks` of the axis "pipe", or moves it there as it is."""
    owners = tuple(sorted(set(pipe_ranks)))
    with strategy.scope():
        layout = getattr(variable._value, "layout", None)  # None: not made yet, or outside the strategy's scope
        if layout is None or layout.pipe_owners != owners:
            request_placement(variable, pipe_owners=owners)
        if variable._value is None:
            # What has been frozen since its layer made it is a parameter all the same, which stage 3 shards.
            is_parameter = variable.trainable or DEFERRAL.now.is_deferred(variable) and variable._initializer.is_trainable
            with temporary.attributes(variable, trainable=is_parameter):
                variable._deferred_initialize()


class UntilInAPipeline(NoDeferral):
    """Under a strategy with a pipeline the weights of layers are made when it is known in which stage they are."""

    def defer(self, variable: keras.Variable, initializer: Callable[..., Any]) -> bool:
        mesh = current_mesh()
        if mesh is None or mesh.pipeline_parallel_size == 1 or _has_place(variable):
            return False
        if not isinstance(keras_scope.current_layer(), keras.layers.Layer | keras.random.SeedGenerator):
            return False
        variable._value = None
        variable._initializer = _DeferredInitializer(initializer, variable)
        return True

    def stays_deferred(self, variable: keras.Variable) -> bool:
        # Keras itself puts off making the weights of a layer that is built by calling it, until it has left the symbolic call.
        if self.is_deferred(variable):
            return not _has_place(variable)
        return variable._initializer is not None and self.defer(variable, variable._initializer)

    def make_to_assign(self, variable: keras.Variable) -> None:
        if self.is_deferred(variable) and not keras_scope.in_stateless_scope():
            strategy = variable._initializer.strategy
            make_on(range(strategy.mesh.pipeline_parallel_size), variable, strategy)

    def is_deferred(self, variable: keras.Variable) -> bool:
        return variable._value is None and isinstance(variable._initializer, _DeferredInitializer)

    def strategy_of(self, variable: keras.Variable) -> Any:
        return variable._initializer.strategy if self.is_deferred(variable) else super().strategy_of(variable)


def _has_place(variable: keras.Variable) -> bool:
    return "pipe_owners" in kept_placement(variable)


class _DeferredInitializer:
    """The initializer of a deferred weight. It refuses to run on a rank that computes: by then the weight should exist."""

    def __init__(self, initializer: Callable[..., Any], variable: keras.Variable):
        self.strategy = tf.distribute.get_strategy()
        self.is_trainable = variable.trainable
        self._initializer = initializer
        self._path = variable.path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if rank_program() is not None:
            raise errors.runtime_error(
                f"Weight {self._path!r} was made under a strategy with a pipeline, but is in no pipeline.",
                fix="Wrap the model: `tfdist.PipelineModel(model, num_microbatches=...)`, in `strategy.scope()`.",
            )
        return self._initializer(*args, **kwargs)
