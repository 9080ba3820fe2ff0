"""Heads of keys and values that several tensor ranks share: fewer of them than ranks.

    K heads on t = 4 ranks     K = 2: ranks 0 and 1 use head 0, ranks 2 and 3 use head 1        K = 1: all use the one head

Every rank keeps the projections to these heads whole, and computes the one that its own query heads ask. Each rank's gradient of
the projection is then a summand, and the summands are added up over the ranks.

Source: Shazeer 2019, *Fast Transformer Decoding: One Write-Head is All You Need*; sharded as by Megatron-LM.
"""

from typing import Any

import keras
import tensorflow as tf

from tfdist.layers import regions
from tfdist.layers.einsum_axes import COLUMN, sharded_axes


class SharedHeadsEinsumDense(keras.layers.EinsumDense):
    """A projection to K heads that every rank keeps whole, of which it computes the one head that its queries ask."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        if regions.tensor_program() is None:
            return super().call(inputs, training=training)
        axes = sharded_axes(self, COLUMN)
        x = keras.ops.einsum(self.equation, inputs, self._of_own_head(self.kernel, axes.kernel, "kernel"))
        if self.bias is not None:
            x = keras.ops.add(x, self.bias if axes.bias is None else self._of_own_head(self.bias, axes.bias, "bias"))
        return x if self.activation is None else self.activation(x)

    def _of_own_head(self, weight: Any, axis: int, name: str) -> tf.Tensor:
        weight = regions.copy_to(tf.convert_to_tensor(weight), f"{self.name}/{name}")
        ranks = regions.tensor_program().mesh.tensor_parallel_size
        own = regions.tensor_rank() * weight.shape[axis] // ranks
        return weight[tuple([slice(None)] * axis + [slice(own, own + 1)])]
