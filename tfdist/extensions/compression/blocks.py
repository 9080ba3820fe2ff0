"""Few bits a number: whole multiples of a step that a block of neighbours shares.

    block x_1 ... x_B    scale s = max |x_i| / m    codes c_i = round(x_i / s), |c_i| <= m    decoded c_i s

with m = 127 (8 bits) or 7 (4 bits), rounded to the nearest, halves to even: |decoded - x| <= s / 2, up to float32's rounding. A
row is padded with zeros to whole blocks, and blocks do not reach from one row into the next.

A block in which something is not finite has NaN for its scale and is NaN as a whole. That shows in the codes, which are NaN
where x is or where s is infinite, and not by the maximum: XLA's, and that of some GPU kernels, passes NaN over. A block whose
scale would be below 2^-126, the smallest normal float32, is zeros: TensorFlow computes with no smaller ones.

Source: ZeRO++ (Wang et al. 2023) and SDP4Bit (Jia et al. 2024) send gradients so.
"""

import abc
import dataclasses

import tensorflow as tf

from tfdist import errors
from tfdist.collectives.transports.kernel_settings import with_zeros
from tfdist.extensions.compression.words import joined, packed, parted, unpacked
from tfdist.sharding.compression import Compressor

_SMALLEST_SCALE = 2.0**-126


class _Blocks(Compressor):
    """Blocks of codes of `_bits` each in [-m, m], m = `_most`, then the scales of all blocks, in `_scale_dtype`."""

    block_size: int
    _bits: int
    _most: float
    _scale_dtype: tf.DType

    def __post_init__(self) -> None:
        errors.check_integer("block_size", self.block_size, 1)
        each = 32 // self._bits
        if self.block_size % each:
            raise errors.value_error(
                f"`block_size` must be a multiple of {each}, the codes of {self._bits} bits in a word.",
                block_size=self.block_size,
                fix=f"Sizes that work: {max(self.block_size // each, 1) * each}, {(self.block_size // each + 1) * each}.",
            )

    def encode(self, x: tf.Tensor) -> tf.Tensor:
        rows, number = x.shape[0], self._number(x.shape[1])
        blocks = tf.reshape(with_zeros(x, number * self.block_size - x.shape[1], 1), [rows, number, self.block_size])
        scales = tf.reduce_max(tf.abs(blocks), axis=2, keepdims=True) * (1 / self._most)
        scales = tf.cast(tf.cast(scales, self._scale_dtype), tf.float32)  # as they are decoded
        is_normal = scales >= _SMALLEST_SCALE  # False for NaN
        codes = tf.round(blocks * tf.where(is_normal, 1.0 / scales, 0.0))
        scales = tf.where(is_normal, scales, 0.0)
        is_finite = tf.math.is_finite(tf.reduce_sum(codes, axis=2, keepdims=True))
        scales = tf.where(is_finite, scales, float("nan"))
        codes = self._narrow(tf.reshape(codes, [rows, number * self.block_size]))
        scales = tf.reshape(scales, [rows, number])
        return joined([packed(codes), scales if self._scale_dtype == tf.float32 else packed(tf.cast(scales, self._scale_dtype))])

    def decode(self, words: tf.Tensor, n: int) -> tf.Tensor:
        rows, number = words.shape[0], self._number(n)
        codes, scales = parted(words, self._sizes(n))
        wide = tf.reshape(self._wide(codes), [rows, number, self.block_size])
        if self._scale_dtype != tf.float32:
            scales = tf.cast(unpacked(scales, self._scale_dtype, number), tf.float32)
        decoded = tf.reshape(wide * tf.reshape(scales, [rows, number, 1]), [rows, number * self.block_size])
        return decoded[:, :n] if n < decoded.shape[1] else decoded

    def bytes_of(self, n: int) -> int:
        return 4 * sum(self._sizes(n))

    def _number(self, n: int) -> int:
        """Returns the number of blocks of a row."""
        return -(-n // self.block_size)

    def _sizes(self, n: int) -> list[int]:
        """Returns the words of a row's codes and of its scales."""
        number = self._number(n)
        return [number * self.block_size * self._bits // 32, -(-number * self._scale_dtype.size // 4)]

    @abc.abstractmethod
    def _narrow(self, codes: tf.Tensor) -> tf.Tensor:
        """Returns `codes`, (rows, n) of float32, in bytes: (rows, n * bits / 8)."""

    @abc.abstractmethod
    def _wide(self, part: tf.Tensor) -> tf.Tensor:
        """Returns the codes, (rows, n) of float32, whose bytes `part` is, in words; the inverse of `_narrow`, packed."""


@dataclasses.dataclass(frozen=True)
class Int8(_Blocks):
    """Numbers of 8 bits in blocks that share a float32 scale: 1 + 4 / block_size bytes each, 1.016 with the default.

    The error of a number is at most 1/254 of the largest of its block.

    Args:
        block_size: numbers in a block, a multiple of 4. Smaller blocks are more exact, and their scales take more bytes.

    Raises:
        ValueError: `block_size` is no positive multiple of 4.
    """

    block_size: int = 256

    _bits = 8
    _most = 127.0
    _scale_dtype = tf.float32

    def _narrow(self, codes: tf.Tensor) -> tf.Tensor:
        return tf.cast(codes, tf.int8)

    def _wide(self, part: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.bitcast(part, tf.int8), tf.float32)


@dataclasses.dataclass(frozen=True)
class Int4(_Blocks):
    """Numbers of 4 bits in blocks that share a bfloat16 scale: 1/2 + 2 / block_size bytes each, 0.5625 with the default.

    The error of a number is at most 1/14 of the largest of its block, up to the scale's rounding (0.4 % of it).

    Args:
        block_size: numbers in a block, a multiple of 8. Smaller blocks are more exact, and their scales take more bytes.

    Raises:
        ValueError: `block_size` is no positive multiple of 8.
    """

    suits_weights = False

    block_size: int = 32

    _bits = 4
    _most = 7.0
    _scale_dtype = tf.bfloat16

    def _narrow(self, codes: tf.Tensor) -> tf.Tensor:
        # Two bytes of a code each as one number of 16 bits, 0000 hhhh 0000 llll, of which the lower byte becomes hhhh llll.
        rows, n = codes.shape
        pairs = tf.bitcast(tf.reshape(tf.cast(codes + 8.0, tf.uint8), [rows, n // 2, 2]), tf.uint16)
        both = tf.bitwise.bitwise_or(pairs, tf.bitwise.right_shift(pairs, tf.constant(4, tf.uint16)))
        return tf.cast(tf.bitwise.bitwise_and(both, tf.constant(0xFF, tf.uint16)), tf.uint8)

    def _wide(self, part: tf.Tensor) -> tf.Tensor:
        both = tf.cast(tf.bitcast(part, tf.uint8), tf.uint16)
        pairs = tf.bitwise.bitwise_or(both, tf.bitwise.left_shift(both, tf.constant(4, tf.uint16)))
        pairs = tf.bitwise.bitwise_and(pairs, tf.constant(0x0F0F, tf.uint16))
        return tf.cast(tf.bitcast(pairs, tf.uint8), tf.float32) - 8.0
