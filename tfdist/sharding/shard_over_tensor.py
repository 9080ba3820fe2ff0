"""Sharding a Keras variable over the tensor axis.

A layer makes its weights as ever, whole; then it says how they are sharded. The request is kept on the Keras variable, since
Keras puts off making the variables of a model that is built by calling.

`_value` is private to Keras: tests/layers/test_private_names_of_layers.py fails when it changes.
"""

from __future__ import annotations

import keras

from tfdist.mesh import current_mesh
from tfdist.sharding.placement_request import keep_placement, make_again
from tfdist.sharding.placements import Shard


def shard_over_tensor(variable: keras.Variable, placement: Shard) -> None:
    """Shards a layer's weight over the tensor axis of the strategy in whose scope it was made; it keeps its value.

    Nothing happens under a strategy without a tensor axis, or none.

    Args:
        variable: whole so far.
        placement: the axis to shard.

    Raises:
        ValueError: the axis does not exist, or the tensor size does not divide its length and `placement` is not padded.
    """
    mesh = current_mesh()
    if mesh is None or mesh.tensor_parallel_size == 1:
        return
    keep_placement(variable, tensor=placement)
    if variable._value is not None:
        make_again(variable)
