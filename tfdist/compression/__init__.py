"""Level 1: how numbers travel in fewer bytes: gradients in blocks of few bits, the largest ones exactly, half precision.

A strategy takes one by name or as an object: `gradient_compression="int8"`, `gradient_compression=Int8(block_size=128)`.
"""

from tfdist.compression.bfloat16 import BFloat16
from tfdist.compression.blocks import Int4, Int8
from tfdist.compression.compressor import EXACT, Compressor, Exact
from tfdist.compression.names import NAMES, compressor_of
from tfdist.compression.top_k import TopK

__all__ = ["BFloat16", "Compressor", "Int4", "Int8", "TopK"]
