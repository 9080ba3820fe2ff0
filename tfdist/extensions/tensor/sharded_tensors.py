"""Activations that leave a layer sharded over the tensor axis, and who may see them.

A layer with `gather_output=False` returns this rank's part of its output. The tensor carries a mark that says so
(`tfdist.sharding.sharded_activations`), so that nobody takes the part for the whole:

* `VocabParallelCrossentropy` and layers with `input_is_parallel=True` compute on the part;
* every other Keras loss, and metrics, get the whole: it is gathered for them;
* what leaves the function given to `strategy.run` (the outputs of `predict`) is gathered on its way out.

Such a layer also says so before it computes, in its attribute `output_shard`, for a pipeline that is divided after it.
"""

from typing import Any

import tensorflow as tf

from tfdist.extensions.tensor import regions
from tfdist.sharding.sharded_activations import AllWhole, copy_mask, shard_of


def whole(x: Any) -> Any:
    """Returns `x`, gathered over the tensor axis if it is sharded."""
    shard = shard_of(x)
    if shard is None or regions.tensor_program() is None:
        return x
    gathered = shard.without_padding(regions.gather_from(x, shard.axis, "gather_output"))
    copy_mask(x, gathered)
    return gathered


class Gathered(AllWhole):
    """Layers may leave their outputs sharded."""

    def all_whole(self, structure: Any) -> Any:
        if not any(shard_of(leaf) for leaf in tf.nest.flatten(structure)):
            return structure
        return tf.nest.map_structure(whole, structure)
