"""Level 6: tensor-parallel layers, and what Keras layers must know of the ranks.

Of the modules below nothing is called by hand. Inside `strategy.run` of a tfdist strategy

* data ranks draw different random numbers from one seed: a dropout mask is not repeated on every part of the batch
  (`randomness`);
* what a step assigns to variables is what one device would assign, or, as the moving statistics of `BatchNormalization`, averaged
  over the ranks at its end (`statistics`);
* `BatchNormalization(synchronized=True)` normalises over the global batch (`normalization`);
* convolutions and poolings work on ranks whose piece of the batch is empty (`empty_batches`);
* activations that a tensor-parallel layer leaves sharded are whole for those who want them whole (`sharded_tensors`).
"""

from tfdist.layers import empty_batches, normalization, randomness, regions, sharded_tensors, statistics
from tfdist.layers.parallel_attention import ParallelGroupedQueryAttention, ParallelMultiHeadAttention
from tfdist.layers.parallel_conv import ColumnParallelConv2D, RowParallelConv2D
from tfdist.layers.parallel_dense import ColumnParallelDense, RowParallelDense
from tfdist.layers.parallel_einsum_dense import ColumnParallelEinsumDense, RowParallelEinsumDense
from tfdist.layers.parallel_mlp import ParallelMLP
from tfdist.layers.parallel_normalization import ChannelParallelBatchNormalization
from tfdist.layers.parallel_transformer import ParallelTransformerBlock
from tfdist.layers.recomputed import recompute
from tfdist.layers.vocab_parallel_crossentropy import VocabParallelCrossentropy
from tfdist.layers.vocab_parallel_embedding import VocabParallelEmbedding, VocabParallelReversibleEmbedding

__all__ = [
    "ChannelParallelBatchNormalization",
    "ColumnParallelConv2D",
    "ColumnParallelDense",
    "ColumnParallelEinsumDense",
    "ParallelGroupedQueryAttention",
    "ParallelMLP",
    "ParallelMultiHeadAttention",
    "ParallelTransformerBlock",
    "RowParallelConv2D",
    "RowParallelDense",
    "RowParallelEinsumDense",
    "VocabParallelCrossentropy",
    "VocabParallelEmbedding",
    "VocabParallelReversibleEmbedding",
    "recompute",
]
