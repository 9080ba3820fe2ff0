"""Tensor parallelism: layers of which each rank has a part, and plans that make such layers of a model's.

regions ──> sharded_weights (lora_factors) ──> parallel layers (einsum_axes, headed_layers) ──> plans
sharded_tensors: outputs that stay sharded, gathered for who wants them whole
"""

from tfdist.collectives import OF_EXTENSIONS
from tfdist.extensions.tensor import regions
from tfdist.extensions.tensor.parallel_attention import ParallelGroupedQueryAttention, ParallelMultiHeadAttention
from tfdist.extensions.tensor.parallel_conv import ColumnParallelConv2D, RowParallelConv2D
from tfdist.extensions.tensor.parallel_dense import ColumnParallelDense, RowParallelDense
from tfdist.extensions.tensor.parallel_einsum_dense import ColumnParallelEinsumDense, RowParallelEinsumDense
from tfdist.extensions.tensor.parallel_mlp import ParallelMLP
from tfdist.extensions.tensor.parallel_normalization import ChannelParallelBatchNormalization
from tfdist.extensions.tensor.parallel_transformer import ParallelTransformerBlock
from tfdist.extensions.tensor.sharded_tensors import Gathered
from tfdist.extensions.tensor.vocab_parallel_crossentropy import VocabParallelCrossentropy
from tfdist.extensions.tensor.vocab_parallel_embedding import VocabParallelEmbedding, VocabParallelReversibleEmbedding
from tfdist.sharding.sharded_activations import WHOLE

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
    "regions",
]

WHOLE.now = Gathered()
OF_EXTENSIONS.append(regions.Entered)
