"""The largest numbers exactly, the others in few bits.

    row of n numbers    c = ceil(n / 4096) chunks of l = ceil(n / c), of each chunk the k = ceil(fraction l) largest by magnitude
    words               their values, c k float32 | their places in the chunk, c k of 16 bits | the others, as `rest` has them

Chunks keep the number of words fixed, the search short and places in 16 bits. What is kept is 0 in what `rest` encodes, which so
has smaller scales. What is not finite counts as largest.

The search looks at blocks first: the k largest of a chunk are in the k blocks with the largest maxima.
"""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

from tfdist import errors
from tfdist.compression.blocks import Int4, Int8
from tfdist.compression.compressor import Compressor
from tfdist.compression.words import joined, packed, padded, parted, unpacked

_CHUNK = 4096
_BLOCK = 16
_RESTS: dict[str | None, Compressor | None] = {"int8": Int8(), "int4": Int4(), None: None}


@dataclasses.dataclass(frozen=True)
class TopK(Compressor):
    """The largest numbers exactly, and the rest in few bits: 6 bytes for each that is kept, and those of `rest` for all.

    With the default 1.076 bytes a number (0.06 + 1.016), and with `rest="int4"` 0.623.

    Args:
        fraction: how many of the numbers are sent exactly, in (0, 1].
        rest: "int8", "int4", or None: the others are not sent, which is taken for 0. With Adam that does not train: a gradient
            that is 0 in most steps and then large is another one.
        error_feedback: whether each rank keeps what its messages of a gradient lose, and adds it to the next one. True keeps it
            as `Int8()`, 1.016 bytes a number; a compressor as that, `Exact()` in 4 bytes. None or False: it is lost.

    Raises:
        ValueError: `fraction` is outside (0, 1], `rest` is none of these, or `error_feedback` is none, or has one of its own.
    """

    fraction: float = 0.01
    rest: str | None = "int8"
    error_feedback: bool | Compressor | None = None

    def __post_init__(self) -> None:
        is_number = isinstance(self.fraction, int | float) and not isinstance(self.fraction, bool)
        if not is_number or not 0 < self.fraction <= 1:
            raise errors.value_error("`fraction` must be a number in (0, 1].", fraction=self.fraction)
        if not isinstance(self.rest, str | None) or self.rest not in _RESTS:
            raise errors.value_error('`rest` must be "int8", "int4" or None (nothing else is sent).', rest=self.rest)
        given = self.error_feedback
        if not (given is None or isinstance(given, bool) or isinstance(given, Compressor) and given.feedback is None):
            raise errors.value_error(
                "`error_feedback` must be True, False, None, or a `tfdist.compression.Compressor` without feedback of its own, "
                "which says how what messages lose is kept.",
                error_feedback=given,
                fix="True keeps it as `tfdist.compression.Int8()`.",
            )

    def encode(self, x: tf.Tensor) -> tf.Tensor:
        rows, n = x.shape
        chunks, length, kept = self._sizes(n)
        flat = tf.reshape(padded(x, chunks * length), [rows * chunks, length])
        places = _largest(flat, kept)
        values = tf.gather(flat, places, batch_dims=1)
        parts = [tf.reshape(values, [rows, chunks * kept])]
        parts.append(packed(tf.cast(tf.reshape(tf.cast(places, tf.int64), [rows, chunks * kept]), tf.uint16)))
        if self._rest is not None:
            nothing = tf.zeros([rows * chunks * kept])
            others = tf.tensor_scatter_nd_update(tf.reshape(flat, [-1]), _flat(places, length), nothing)
            others = tf.reshape(others, [rows, chunks * length])[:, :n]
            parts.append(tf.bitcast(self._rest.encode(others), tf.float32))
        return joined(parts)

    def decode(self, words: tf.Tensor, n: int) -> tf.Tensor:
        rows, (chunks, length, kept) = words.shape[0], self._sizes(n)
        parts = parted(words, self._words(n))
        if self._rest is not None:
            others = padded(self._rest.decode(tf.bitcast(parts[2], tf.int32), n), chunks * length)
        else:
            others = tf.zeros([rows, chunks * length])
        places = tf.reshape(tf.cast(unpacked(parts[1], tf.uint16, chunks * kept), tf.int64), [rows * chunks, kept])
        whole = tf.tensor_scatter_nd_update(tf.reshape(others, [-1]), _flat(places, length), tf.reshape(parts[0], [-1]))
        return tf.reshape(whole, [rows, chunks * length])[:, :n]

    def bytes_of(self, n: int) -> int:
        return 4 * sum(self._words(n))

    @property
    def feedback(self) -> Compressor | None:
        if isinstance(self.error_feedback, bool):
            return Int8() if self.error_feedback else None
        return self.error_feedback

    @property
    def _rest(self) -> Compressor | None:
        return _RESTS[self.rest]

    def _sizes(self, n: int) -> tuple[int, int, int]:
        """Returns of a row the number of chunks, the numbers in each, and how many of them are kept."""
        chunks = max(-(-n // _CHUNK), 1)
        length = -(-n // chunks)
        return chunks, length, math.ceil(self.fraction * length - 1e-9)  # 0.1 * 30 is 3.0000000000000004

    def _words(self, n: int) -> list[int]:
        """Returns the words of values, of places and of the rest."""
        chunks, _, kept = self._sizes(n)
        rest = [] if self._rest is None else [self._rest.bytes_of(n) // 4]
        return [chunks * kept, -(-chunks * kept // 2), *rest]


def _largest(x: tf.Tensor, kept: int) -> tf.Tensor:
    """Returns the places (rows, kept) of the largest by magnitude in each row of `x`, (rows, n); first, of what is not finite."""
    rows, n = x.shape
    if 2 * kept * _BLOCK > n:
        return _largest_of_all(tf.abs(x), kept)
    number = -(-n // _BLOCK)
    sizes = tf.abs(x)
    if number * _BLOCK > n:
        sizes = tf.pad(sizes, [[0, 0], [0, number * _BLOCK - n]], constant_values=-1.0)  # never among the largest
    blocks = tf.reshape(sizes, [rows, number, _BLOCK])
    # Told by the sum, because XLA's maximum passes NaN over.
    is_finite = tf.math.is_finite(tf.reduce_sum(blocks, axis=2))
    chosen = _largest_of_all(tf.where(is_finite, tf.reduce_max(blocks, axis=2), math.inf), kept)
    near = tf.reshape(tf.gather(blocks, chosen, batch_dims=1), [rows, kept * _BLOCK])
    # As float32, which has them exactly: a GPU has no arithmetic of int32.
    places = tf.cast(chosen, tf.float32)[:, :, tf.newaxis] * _BLOCK + tf.range(_BLOCK, dtype=tf.float32)
    places = tf.reshape(places, [rows, kept * _BLOCK])
    return tf.cast(tf.gather(places, _largest_of_all(near, kept), batch_dims=1), tf.int32)


def _largest_of_all(sizes: tf.Tensor, kept: int) -> tf.Tensor:
    return tf.math.top_k(tf.where(tf.math.is_nan(sizes), math.inf, sizes), kept, sorted=False).indices


def _flat(places: tf.Tensor, length: int) -> tf.Tensor:
    """Returns the indices (chunks * kept, 1) in a vector of chunks of `length`, of `places` (chunks, kept) in each chunk."""
    starts = tf.range(0, places.shape[0] * length, length, tf.int64)  # of int64: a GPU adds no int32
    return tf.reshape(tf.cast(places, tf.int64) + starts[:, tf.newaxis], [-1, 1])
