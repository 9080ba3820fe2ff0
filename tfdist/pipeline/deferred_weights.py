"""Weights of a pipelined model, which are made when it is known in which stage they are.

Under a strategy with a pipeline a layer's weights are not made where the layer is built: nobody knows yet in which stage that
is, and a rank of another stage is never to hold them. They keep their initializer, and are made when `place` says where.

`_value` and `_initializer` are private to Keras: tests/pipeline/test_private_names_of_pipeline.py fails when they change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.collectives import rank_program
from tfdist.mesh import current_mesh
from tfdist.sharding import kept_placement, keras_scope, request_placement


def place(variable: keras.Variable, pipe_ranks: Sequence[int], strategy: tf.distribute.Strategy) -> None:
    """Makes a layer's weight on the pipeline coordinates `pipe_ranks`, or moves it there; it keeps its value."""
    owners = tuple(sorted(set(pipe_ranks)))
    with strategy.scope():
        layout = getattr(variable._value, "layout", None)  # None: not made yet, or outside the strategy's scope
        if layout is None or layout.pipe_owners != owners:
            request_placement(variable, pipe_owners=owners)
        if variable._value is None:
            variable._deferred_initialize()


class _Later:
    """The initializer of a weight that is not made yet."""

    def __init__(self, initializer: Callable[..., Any], path: str):
        self.strategy = tf.distribute.get_strategy()
        self._initializer = initializer
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if rank_program() is not None:
            raise RuntimeError(
                errors.message(
                    f"Weight {self._path!r} was made under a strategy with a pipeline, but is in no pipeline.",
                    fix="Wrap the model: `tfdist.PipelineModel(model, num_microbatches=...)`, in `strategy.scope()`.",
                )
            )
        return self._initializer(*args, **kwargs)


def _later(variable: keras.Variable) -> _Later | None:
    """Returns the initializer of a variable that is put off, None of any other."""
    if variable._value is not None:
        return None
    return variable._initializer if isinstance(variable._initializer, _Later) else None


def _has_place(variable: keras.Variable) -> bool:
    return "pipe_owners" in kept_placement(variable)


def put_off(variable: keras.Variable, initializer: Callable[..., Any]) -> bool:
    """Puts a variable off that is a layer's and whose place is not known; returns whether it did."""
    mesh = current_mesh()
    if mesh is None or mesh.pipeline_parallel_size == 1 or _has_place(variable):
        return False
    if not isinstance(keras_scope.current_layer(), keras.layers.Layer | keras.random.SeedGenerator):
        return False
    variable._value = None
    variable._initializer = _Later(initializer, variable.path)
    return True


def stays_put_off(variable: keras.Variable) -> bool:
    """Whether a variable that Keras wants to make now is put off, and its place is still not known."""
    return _later(variable) is not None and not _has_place(variable)


def make_to_assign(variable: keras.Variable) -> None:
    """Makes a variable that is put off on every rank, before it is assigned: its value must be kept."""
    later = _later(variable)
    if later is not None and not keras_scope.in_stateless_scope():
        place(variable, range(later.strategy.mesh.pipeline_parallel_size), later.strategy)
