"""Cutting a Keras variable over the tensor axis.

A layer makes its weights as ever, whole; then it says how they are cut. The wish travels with the initial value, which the
strategy asks for when it makes a variable: at once, or later, where Keras puts off making the variables of a model that is built
by calling.

`_value` and `_initializer` are private to Keras: tests/layers/test_private_names_of_layers.py fails when they change.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import RankProgram, wire
from tfdist.mesh import current_mesh
from tfdist.sharding import packing
from tfdist.sharding.layout import Layout
from tfdist.sharding.placements import Replicate, Shard

_local = threading.local()


class CutInitializer:
    """An initializer of a variable that is to be cut: `placement`."""

    def __init__(self, initializer: Callable[..., Any], placement: Shard):
        self.initializer = initializer
        self._placement = placement

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> Any:
        _local.wish = self._placement
        return self.initializer(shape, dtype=dtype, **kwargs)


@contextlib.contextmanager
def wishes() -> Iterator[Callable[[], Replicate | Shard]]:
    """Within it an initial value may be drawn; the function that it gives returns how the variable is to be cut."""
    _local.wish = Replicate()
    try:
        yield lambda: _local.wish
    finally:
        _local.wish = Replicate()


def cut_over_tensor(variable: keras.Variable, placement: Shard) -> None:
    """Cuts a layer's weight over the tensor axis of the strategy in whose scope it was made; it keeps its value.

    Nothing happens under a strategy without a tensor axis, or none.

    Args:
        variable: whole so far.
        placement: the axis to cut.

    Raises:
        ValueError: the axis does not exist, or the tensor size does not divide its length and `placement` is not padded.
    """
    mesh = current_mesh()
    if mesh is None or mesh.tensor_parallel_size == 1:
        return
    if variable._value is None:
        variable._initializer = CutInitializer(variable._initializer, placement)
        return
    whole = tf.identity(variable._value)
    initializer = CutInitializer(lambda shape, dtype=None: tf.cast(whole, dtype), placement)
    with tf.init_scope():
        variable._initialize_with_initializer(initializer)


def gather_cuts(program: RankProgram, local: tf.Tensor, layout: Layout, label: str) -> tf.Tensor:
    """Returns the global tensor of `layout` from this rank's local one, gathered over the tensor axis."""
    if not layout.is_tensor_sharded:
        return local
    gathered = wire.all_gather(program, local[tf.newaxis], program.group_ranks("tensor"), label)
    return packing.join_tensor_cuts(tf.unstack(gathered), layout)
