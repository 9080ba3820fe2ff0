"""The largest numbers exactly, the others in few bits.

    row of n numbers    c = ceil(n / 4096) chunks of l = ceil(n / c), of each chunk the k = ceil(fraction l) largest by magnitude
    words               their values, c k float32 | their places in the chunk, c k of 16 bits | the others, as `rest` has them

Chunks keep the number of words fixed, the search short and places in 16 bits. What is kept is 0 in what `rest` encodes, which so
has smaller scales. What is not finite counts as largest.

The search looks at blocks first: the k largest of a chunk are in the k blocks with the largest maxima.
"""

import dataclasses
import math

import tensorflow as tf

from tfdist import errors
from tfdist.collectives.transports.kernel_settings import with_zeros
from tfdist.extensions.compression.blocks import Int4, Int8
from tfdist.extensions.compression.words import joined, packed, parted, unpacked
from tfdist.sharding.compression import Compressor

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

    suits_weights = False

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
        flat = tf.reshape(with_zeros(x, chunks * length - n, 1), [rows * chunks, length])
        values, places = _largest(flat, kept)
        parts = [tf.reshape(values, [rows, chunks * kept])]
        parts.append(packed(tf.cast(tf.reshape(places, [rows, chunks * kept]), tf.uint16)))
        if self._rest is not None:
            is_kept = tf.not_equal(_spread(values, places, length), 0.0)
            others = tf.reshape(tf.where(is_kept, 0.0, flat), [rows, chunks * length])[:, :n]
            parts.append(tf.bitcast(self._rest.encode(others), tf.float32))
        return joined(parts)

    def decode(self, words: tf.Tensor, n: int) -> tf.Tensor:
        chunks, length, _ = self._sizes(n)
        largest = tf.reshape(_spread(*self._largest_in(words, n), length), [words.shape[0], chunks * length])
        largest = largest[:, :n] if n < chunks * length else largest
        if self._rest is None:
            return largest
        return self._rest.decode(tf.bitcast(parted(words, self._words(n))[2], tf.int32), n) + largest

    def summed(self, words: tf.Tensor, n: int) -> tf.Tensor:
        rows, (chunks, length, kept) = words.shape[0], self._sizes(n)
        if self._rest is not None or rows > 2:  # a GPU adds what has one place in any order, which of two does not matter
            return super().summed(words, n)
        values, places = (
            tf.reshape(tf.transpose(tf.reshape(part, [rows, chunks, kept]), [1, 0, 2]), [chunks, rows * kept])
            for part in self._largest_in(words, n)
        )
        return tf.reshape(_spread(values, places, length), [-1])[:n]

    def _largest_in(self, words: tf.Tensor, n: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the largest of each chunk of all rows, and their places in it: (rows * chunks, kept)."""
        (values, places, *_), (chunks, _, kept) = parted(words, self._words(n)), self._sizes(n)
        places = tf.cast(unpacked(places, tf.uint16, chunks * kept), tf.float32)
        return tf.reshape(values, [-1, kept]), tf.reshape(places, [-1, kept])

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


def _largest(x: tf.Tensor, kept: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the largest by magnitude in each row of `x`, (rows, n), first what is not finite: values and places, (rows, kept).

    Places are float32, which has them exactly: a GPU has no arithmetic of int32.
    """
    rows, n = x.shape
    if 2 * kept * _BLOCK > n:
        places = tf.math.top_k(_without_nan(tf.abs(x)), kept, sorted=False).indices
        return tf.gather(x, places, batch_dims=1), tf.cast(places, tf.float32)
    number = -(-n // _BLOCK)
    blocks = tf.reshape(with_zeros(x, number * _BLOCK - n, 1), [rows, number, _BLOCK])
    sizes = tf.maximum(tf.reduce_max(blocks, axis=2), -tf.reduce_min(blocks, axis=2))
    # Found by the sum, because XLA's maximum passes NaN over.
    is_finite = tf.math.is_finite(tf.reduce_sum(blocks, axis=2))
    chosen = tf.math.top_k(tf.where(is_finite, sizes, math.inf), kept, sorted=False).indices
    near = tf.gather(blocks, chosen, batch_dims=1)
    places = tf.cast(chosen, tf.float32)[:, :, tf.newaxis] * _BLOCK + tf.range(_BLOCK, dtype=tf.float32)
    sizes = _without_nan(tf.abs(near))
    if number * _BLOCK > n:
        sizes = tf.where(places < n, sizes, -1.0)  # none that pads a row
    # In each block one at least is as large as this: those that are smaller need no sorting.
    least = tf.reduce_min(tf.reduce_max(sizes, axis=2, keepdims=True), axis=1, keepdims=True)
    near, places, sizes = (
        tf.reshape(each, [rows, kept * _BLOCK]) for each in (near, places, tf.where(sizes < least, -1.0, sizes))
    )
    found = tf.math.top_k(sizes, kept, sorted=False).indices
    return tf.gather(near, found, batch_dims=1), tf.gather(places, found, batch_dims=1)


def _without_nan(sizes: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.math.is_nan(sizes), math.inf, sizes)


def _spread(values: tf.Tensor, places: tf.Tensor, length: int) -> tf.Tensor:
    """Returns rows of `length` with `values` at `places`, (rows, kept) both, and zeros: what has one place is added up.

    By an operation made for histograms: TensorFlow's scattering takes some hundred nanoseconds a value.
    """
    return tf.raw_ops.DenseBincount(input=tf.cast(places, tf.int32), size=length, weights=values, binary_output=False)
