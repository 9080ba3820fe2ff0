"""An embedding table whose rows are spread over the tensor ranks.

vocabulary 10, t = 4, padded to 12     rank 0: rows [0, 3)   rank 1: [3, 6)   rank 2: [6, 9)   rank 3: [9, 10), 2 of zeros
"""

from typing import Any

import keras
import tensorflow as tf

from tfdist.extensions.tensor import regions, sharded_tensors
from tfdist.extensions.tensor.lora_factors import TABLE
from tfdist.extensions.tensor.sharded_weights import ShardedWeights, check_is_sharded
from tfdist.sharding import Shard
from tfdist.sharding.sharded_activations import ActivationShard, mark_shard


class _VocabParallel(ShardedWeights):
    """The lookup that both embeddings share."""

    _factored = TABLE

    @property
    def embeddings(self) -> Any:
        """The table, with LoRA the product of its factors added; inside a replica this rank's rows of that."""
        is_here = getattr(self, "lora_enabled", False) and regions.tensor_program() is not None
        return TABLE.merged(self) if is_here else super().embeddings

    @classmethod
    def _shards(cls, layer: Any) -> dict[str, Shard]:
        return {"_embeddings": Shard(0, is_padded=True), "reverse_embeddings": Shard(1, is_padded=True)}

    def build(self, input_shape: Any = None) -> None:
        if not self.built:  # `weights=` has built it
            super().build(input_shape)

    def _lookup(self, inputs: Any) -> tf.Tensor:
        """Returns the rows of `inputs`, integers (batch, ...): (batch, ..., output_dim), whole."""
        check_is_sharded(self, self._embeddings)
        if inputs.dtype not in (tf.int32, tf.int64):
            inputs = tf.cast(inputs, tf.int32)
        table = tf.convert_to_tensor(self.embeddings)  # (rows, output_dim)
        rows = table.shape[0]
        start = regions.tensor_rank() * rows  # vocab_start_index
        is_here = (inputs >= start) & (inputs < start + rows)
        is_elsewhere = (inputs >= 0) & (inputs < self.input_dim) & ~is_here
        # What is in no rank's part stays out of range, so that it fails as in an `Embedding`.
        places = tf.where(is_elsewhere, tf.zeros_like(inputs), inputs - start)
        found = tf.cast(keras.ops.take(table, places, axis=0), self.compute_dtype)
        found = tf.where(is_here[..., tf.newaxis], found, tf.zeros_like(found))
        return regions.reduce_from(found, f"{self.name}/reduce_from")


@keras.saving.register_keras_serializable("tfdist")
class VocabParallelEmbedding(_VocabParallel, keras.layers.Embedding):
    """`keras.layers.Embedding` whose rows are spread over the tensor ranks (Megatron's vocabulary-parallel embedding).

    Each rank looks up the tokens that it has; forward it all-reduces the output, backward it sends nothing. A vocabulary that the
    tensor size does not divide is padded with rows of zeros, which nobody sees.

    Outside replicas, and where the strategy has no tensor axis, it is `keras.layers.Embedding`.

    Args:
        *args, **kwargs: as of `keras.layers.Embedding`, without `quantization_config`.

    Input shape:
        (batch, ...), integers, whole.

    Output shape:
        (batch, ..., output_dim), whole.

    Source: Megatron-LM, Shoeybi et al. 2019.
    """

    def call(self, inputs: Any) -> Any:
        return super().call(inputs) if regions.tensor_program() is None else self._lookup(inputs)


@keras.saving.register_keras_serializable("tfdist")
class VocabParallelReversibleEmbedding(_VocabParallel, keras.layers.ReversibleEmbedding):
    """`keras.layers.ReversibleEmbedding`, vocabulary-parallel: also called in reverse, for logits from the same table.

    `layer(hidden, reverse=True)` sends nothing forward and all-reduces the gradient of `hidden` backward. Its logits stay
    sharded: `VocabParallelCrossentropy` computes on them as they are; every other loss, metrics and `predict` get them gathered.

    Args:
        *args, **kwargs: as of `keras.layers.ReversibleEmbedding`, without `quantization_config`.

    Output shape:
        in reverse (batch, ..., input_dim); inside a replica (batch, ..., ceil(input_dim / t)), in which a padded vocabulary has
        columns that do not count.
    """

    gather_output = False  # True where `tfdist.parallelize` sharded the layer of a model that knows nothing of shards

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        if regions.tensor_program() is None:
            return super().call(inputs, reverse=reverse)
        if reverse:
            logits = super().call(regions.copy_to(inputs, f"{self.name}/copy_to"), reverse=True)
            logits = mark_shard(logits, ActivationShard(-1, self.input_dim))
            return sharded_tensors.whole(logits) if self.gather_output else logits
        found = self._lookup(inputs)
        mask = self.compute_mask(inputs)
        if mask is not None:
            found._keras_mask = mask
        return found
