"""Half the bytes: the upper half of each float32."""

import dataclasses

import tensorflow as tf

from tfdist.extensions.compression.words import joined, packed, parted, unpacked
from tfdist.sharding.compression import Compressor


@dataclasses.dataclass(frozen=True)
class BFloat16(Compressor):
    """Numbers rounded to bfloat16: 2 bytes each, an error of at most 2^-9 of each number."""

    def encode(self, x: tf.Tensor) -> tf.Tensor:
        return joined([packed(tf.cast(x, tf.bfloat16))])

    def decode(self, words: tf.Tensor, n: int) -> tf.Tensor:
        (bits,) = parted(words, [words.shape[1]])
        return tf.cast(unpacked(bits, tf.bfloat16, n), tf.float32)

    def bytes_of(self, n: int) -> int:
        return 4 * -(-n // 2)
