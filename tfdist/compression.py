"""How numbers travel in fewer bytes: gradients in blocks of few bits, the largest ones exactly, half precision.

A strategy takes one by name or as an object: `gradient_compression="int8"`, `gradient_compression=Int8(block_size=128)`.
"""

from tfdist.extensions.compression import BFloat16, Compressor, Int4, Int8, TopK

__all__ = ["BFloat16", "Compressor", "Int4", "Int8", "TopK"]
