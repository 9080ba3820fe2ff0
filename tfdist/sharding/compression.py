"""How gradients and parameters may travel in fewer bytes: what the core asks of the extension that does it."""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import Communicator, RankProgram
from tfdist.collectives.plan import Ranks
from tfdist.extensible import Place


class Compressor(abc.ABC):
    """How rows of float32 numbers travel as int32 words, of which there are equally many for every row of one length.

    One of your own is a frozen dataclass with these three methods; its `repr` must be the same on all workers. It is traced with
    the step: TensorFlow operations, no state. What is not finite must stay so: an overflow that is lost on the way is a step that
    should have been skipped. Ranks decode what they all have been sent, so decoding must give the same bits on each. With a
    `feedback` of its own, such as `Int8()`, what it loses of a gradient is added to the next one.

    Attributes:
        suits_weights: whether whole weights may travel so (stage 3), and not only what a step has changed of them.
    """

    suits_weights = True

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


class NoCompression:
    """Everything travels as it is: no setting asks for less, no copy is rounded, nothing is lost."""

    def compressor_of(self, argument: str, value: Any) -> Compressor | None:
        """Returns the compressor that `value`, given as `argument`, means: a name, a compressor, or None.

        Raises:
            ValueError: it is none of these.
        """
        if value is not None:
            missing = f"`{argument}` must be None: `tfdist.extensions.compression` is missing."
            raise errors.value_error(missing, **{argument: value})
        return None

    def check_it_pays(self, communicator: Communicator, compressor: Compressor, setting: dict[str, Any]) -> None:
        """Raises NotImplementedError where a group would send more than exact sums do."""

    def reduce_scatter(self, message: Any, rows: Sequence[tf.Tensor], ranks: Ranks, dtype: tf.DType) -> list[tf.Tensor]:
        """Returns this rank's (L,) of the sums over `ranks` of what `message`, a `SumOfGradients`, has: (N, L) of float32."""
        raise NotImplementedError

    def all_reduce(self, message: Any, parts: Sequence[tf.Tensor], ranks: Ranks, label: str, dtype: tf.DType) -> list[tf.Tensor]:
        """Returns the sums over `ranks` of vectors (L,) of float32 that `message`, a `SumOfGradients`, has."""
        raise NotImplementedError

    def all_gather(
        self, program: RankProgram, parts: Sequence[tf.Tensor], compressors: Sequence[Compressor], ranks: Ranks, label: str
    ) -> list[tf.Tensor]:
        """Returns of vectors (L,) of float32 the (N, L) of all `ranks`, decoded, this one's too."""
        raise NotImplementedError

    def gather_differences(
        self, program: RankProgram, shards: Sequence[tf.Tensor], variables: Sequence[Any], label: str, config: Any
    ) -> list[Any]:
        """Brings this rank's rounded copies of `variables` up to what the group's `shards`, (L,) each, of them are."""
        raise NotImplementedError

    def encoded(self, program: RankProgram) -> list[tf.Operation]:
        """Returns after which operations the gradients of the last message are no longer needed in full; none: they travel so."""
        return []

    def keep_losses(self, program: RankProgram, variables: Sequence[Any]) -> None:
        """Lets `variables` keep what the sums have lost with which they are updated here."""

    def keep_state(self, optimizer: Any, variables: Sequence[Any], config: Any, accumulates_partial_sums: bool) -> None:
        """Makes what `variables`, with which `optimizer` is built, need: exact shards of rounded copies, room for what is lost.

        Args:
            accumulates_partial_sums: whether gradients are summed when they have been divided by scales.
        """

    def refuse_two_sums(self, config: Any) -> None:
        """Raises NotImplementedError where what is summed already would be accumulated, and summed and compressed once more."""

    def complete_copies(self, variables: Iterable[Any]) -> None:
        """Gives the copies of those of `variables` that are rounded their exact values. All workers call it at once."""


COMPRESSION: Place[NoCompression] = Place(NoCompression())
