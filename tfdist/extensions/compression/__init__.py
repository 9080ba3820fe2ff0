"""How numbers travel in fewer bytes: gradients in blocks of few bits, the largest ones exactly, half precision.

bfloat16, blocks, top_k (words) ──> names ──> compressed (sums and gathers of words) ──> compressing: what the core asks
exact_shards: what is updated where copies are rounded; error_feedback, residual, residuals: what gradients lose, kept

A strategy takes one by name or as an object: `gradient_compression="int8"`, `gradient_compression=Int8(block_size=128)`.
"""

from tfdist.collectives import OF_EXTENSIONS
from tfdist.extensions.compression.bfloat16 import BFloat16
from tfdist.extensions.compression.blocks import Int4, Int8
from tfdist.extensions.compression.compressing import Compressing
from tfdist.extensions.compression.error_feedback import ErrorFeedback
from tfdist.extensions.compression.names import NAMES, compressor_of
from tfdist.extensions.compression.top_k import TopK
from tfdist.sharding.compression import COMPRESSION, EXACT, Compressor, Exact

__all__ = ["EXACT", "NAMES", "BFloat16", "Compressor", "Exact", "Int4", "Int8", "TopK", "compressor_of"]

COMPRESSION.now = Compressing()
OF_EXTENSIONS.append(ErrorFeedback)
