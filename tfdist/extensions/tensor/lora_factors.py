"""LoRA on a weight that is sharded over the tensor ranks: how its two factors are placed, and what each rank computes with.

    W' = W + s A B       W sharded along its last axis: B is, too, A is whole        W'_i = W_i + s A B_i
                         W sharded along another one: A is, too, B is whole          W'_i = W_i + s A_i B

The whole factor enters the sharded region as a whole activation does: what a rank computes of its gradient is a summand, and the
summands are added up on the way back. A table whose rows are padded has a padded A.

Source: the factors are those of Keras's `enable_lora`; Hu et al. 2021.
"""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfdist.extensions.tensor import regions
from tfdist.sharding import Shard


@dataclasses.dataclass(frozen=True)
class FactoredWeight:
    """A weight that Keras can add a product of two factors to, by the names of the layer's attributes."""

    weight: str
    a: str
    b: str

    def shards(self, layer: Any, placement: Shard) -> dict[str, Shard]:
        """Returns how the factor is sharded that shares an axis with the weight, which is sharded by `placement`."""
        last = len(getattr(layer, self.weight).shape) - 1
        if placement.axis == last:
            return {self.b: Shard(1, is_padded=placement.is_padded)}
        return {self.a: placement}

    def merged(self, layer: Any) -> tf.Tensor:
        """Returns this rank's part of the weight and of the product, for a layer on which LoRA is enabled."""
        factors = []
        for name in (self.a, self.b):
            variable = getattr(layer, name)
            factor = tf.convert_to_tensor(variable)
            layout = getattr(variable._value, "layout", None)
            is_sharded = layout is not None and layout.is_tensor_sharded
            factors.append(factor if is_sharded else regions.copy_to(factor, f"{layer.name}/{name}"))
        product = (layer.lora_alpha / layer.lora_rank) * keras.ops.matmul(*factors)
        weight = tf.convert_to_tensor(getattr(layer, self.weight))
        return keras.ops.cast(keras.ops.add(weight, product), layer.compute_dtype)


KERNEL = FactoredWeight("_kernel", "lora_kernel_a", "lora_kernel_b")
TABLE = FactoredWeight("_embeddings", "lora_embeddings_a", "lora_embeddings_b")
