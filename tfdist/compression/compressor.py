"""What every compressor has: a way into words and back, and how many bytes they are."""

import abc
import dataclasses

import tensorflow as tf


class Compressor(abc.ABC):
    """How rows of float32 numbers travel as int32 words, of which there are equally many for every row of one length.

    One of your own is a frozen dataclass with these three methods; its `repr` must be the same on all workers. It is traced with
    the step: TensorFlow operations, no state. What is not finite must stay so: an overflow that is lost on the way is a step that
    should have been skipped. Ranks decode what they all have been sent, so decoding must give the same bits on each. With a
    `feedback` of its own, such as `Int8()`, what it loses of a gradient is added to the next one.
    """

    @abc.abstractmethod
    def encode(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the words of `x`: (rows, n) of float32, of static shape, to (rows, bytes_of(n) / 4) of int32."""

    @abc.abstractmethod
    def decode(self, words: tf.Tensor, n: int) -> tf.Tensor:
        """Returns the rows of `n` numbers whose words are `words`: (rows, bytes_of(n) / 4) of int32 to (rows, n) of float32."""

    @abc.abstractmethod
    def bytes_of(self, n: int) -> int:
        """Returns the bytes of a row of `n` numbers, a multiple of 4."""

    def summed(self, words: tf.Tensor, n: int) -> tf.Tensor:
        """Returns the sum (n,), in order, of the rows whose words are `words`."""
        return tf.reduce_sum(self.decode(words, n), axis=0)

    @property
    def feedback(self) -> "Compressor | None":
        """How a rank keeps what its messages of gradients lose, which it adds to the next ones; None: it is lost."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@dataclasses.dataclass(frozen=True)
class Exact(Compressor):
    """The numbers themselves, as they are: 4 bytes each."""

    def encode(self, x: tf.Tensor) -> tf.Tensor:
        return tf.bitcast(x, tf.int32)

    def decode(self, words: tf.Tensor, n: int) -> tf.Tensor:
        return tf.bitcast(words, tf.float32)

    def bytes_of(self, n: int) -> int:
        return 4 * n


EXACT = Exact()
