"""Which pipeline ranks the weights that are being made belong to.

Under a strategy with a pipeline a layer's weights are not made where the layer is built: nobody knows yet in which stage it will
be, and a rank of another stage is never to hold them. They keep their initializer, and are made when `place` says where.

`_value` and `_initializer` are private to Keras: tests/pipeline/test_private_names_of_pipeline.py fails when they
change.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import errors
from tfdist.collectives import rank_program
from tfdist.mesh import current_mesh
from tfdist.sharding import keras_scope
from tfdist.sharding.tensor_cut import CutInitializer
from tfdist.sharding.variable import ShardedVariable

_local = threading.local()


def current_owners() -> tuple[int, ...] | None:
    """Returns the pipeline coordinates that store a layer's weight made here; None: every rank."""
    return getattr(_local, "owners", None)


def place(variable: keras.Variable, pipe_ranks: Sequence[int], strategy: tf.distribute.Strategy) -> None:
    """Makes a layer's weight on the pipeline coordinates `pipe_ranks`, or moves it there; it keeps its value."""
    owners = tuple(sorted(set(pipe_ranks)))
    with strategy.scope(), _owned_by(owners):
        if _later(variable) is not None:
            variable._deferred_initialize()
            return
        value = variable._value
        layout = value.layout if isinstance(value, ShardedVariable) else None
        if layout is not None and layout.pipe_owners == owners:
            return
        whole = tf.identity(value)
        initializer: Callable[..., Any] = lambda shape, dtype=None: whole  # noqa: E731
        if layout is not None and layout.is_tensor_sharded:
            initializer = CutInitializer(initializer, layout.tensor)
        with tf.init_scope():
            variable._initialize_with_initializer(initializer)


@contextlib.contextmanager
def _owned_by(owners: tuple[int, ...]) -> Iterator[None]:
    _local.owners = owners
    try:
        yield
    finally:
        _local.owners = None


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
    initializer = variable._initializer
    if isinstance(initializer, CutInitializer):
        initializer = initializer.initializer
    return initializer if isinstance(initializer, _Later) else None


def put_off(variable: keras.Variable, initializer: Callable[..., Any]) -> bool:
    """Puts a variable off that is a layer's and whose place is not known; returns whether it did."""
    mesh = current_mesh()
    if mesh is None or mesh.pipeline_parallel_size == 1 or current_owners() is not None:
        return False
    if not isinstance(keras_scope.current_layer(), keras.layers.Layer | keras.random.SeedGenerator):
        return False
    variable._value = None
    variable._initializer = _Later(initializer, variable.path)
    return True


def stays_put_off(variable: keras.Variable) -> bool:
    """Whether a variable that Keras wants to make now is put off, and its place is still not known."""
    return _later(variable) is not None and current_owners() is None


def make_to_assign(variable: keras.Variable) -> None:
    """Makes a variable that is put off on every rank, before it is assigned: its value must be kept."""
    later = _later(variable)
    if later is not None and not keras_scope.in_stateless_scope():
        place(variable, range(later.strategy.mesh.pipeline_parallel_size), later.strategy)
