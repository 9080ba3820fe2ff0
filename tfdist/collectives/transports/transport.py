"""Carriers of bytes between ranks: the methods that every transport has.

A group of ranks has one `Transport`, chosen when the strategy is made, and a pair of ranks one `MessageTransport`. Collectives
know nothing else of how bytes travel:

    group_ops, ops, activations     what the collectives of a group mean
    Transport                       how the bytes of one group travel
      Ring, Nccl                    TensorFlow's kernels
      Chunked                       another transport, given large tensors in pieces
      same_host                     what an extension has for the workers of one machine

All methods emit operations, and put the collective in the plan (`Emission.begin`). None has a gradient. They are called in the
scope of the program's device, and never for a group of one rank or for an empty tensor (`group_ops`).
"""

import abc
from collections.abc import Sequence
from typing import cast

import tensorflow as tf

from tfdist.collectives.communicator import Carrier, MessageCarrier
from tfdist.collectives.emission import Emission
from tfdist.collectives.plan import Ranks, TensorLike


class MessageTransport(MessageCarrier, abc.ABC):
    """How messages between two ranks travel: each has a label, and messages have no order among each other, but where they do."""

    @abc.abstractmethod
    def send(self, program: Emission, x: tf.Tensor, destination: int, label: str) -> None:
        """Sends `x` to rank `destination`; only the first dimension of `x` may be unknown."""

    @abc.abstractmethod
    def receive(self, program: Emission, spec: tf.TensorSpec, rows: tf.Tensor, source: int, label: str) -> tf.Tensor:
        """Returns what rank `source` sends, a tensor of `spec`; `rows` is its first dimension, for where `spec` does not tell."""


class Transport(Carrier, abc.ABC):
    """How the collectives of a group of ranks travel."""

    messages: MessageTransport

    @abc.abstractmethod
    def all_reduce(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str, reduce_op: str) -> tf.Tensor:
        """Reduces `x` elementwise by `reduce_op` ("sum", "max", "min") over `ranks`."""

    @abc.abstractmethod
    def all_gather(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        """Concatenates `x` of all `ranks`, of one shape, along axis 0, in group order."""

    @abc.abstractmethod
    def all_to_all(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str) -> tf.Tensor:
        """Sends `x[i]` to the i-th of `ranks` and returns what each sent here, stacked: (N, ...) to (N, ...)."""

    @abc.abstractmethod
    def reduce_scatter(self, program: Emission, x: tf.Tensor, ranks: Ranks, label: str, dtype: tf.DType) -> tf.Tensor:
        """Sums `x`, of shape (N, ...), over `ranks`, and returns row i to the i-th rank as `dtype`: (N, ...) to (...)."""

    @abc.abstractmethod
    def broadcast(self, program: Emission, x: TensorLike, ranks: Ranks, source: int, op: str, label: str) -> tf.Tensor:
        """Returns the `x` of rank `source` on every one of `ranks`; the others give its static shape and dtype as `x`.

        `op` is what the plan calls it.
        """

    def all_gather_parts(self, program: Emission, parts: Sequence[tf.Tensor], ranks: Ranks, label: str) -> list[tf.Tensor]:
        """All-gathers vectors of one dtype in one collective; returns of each the (N, L) of all `ranks`, flattened or not."""
        if len(parts) == 1:
            return [self.all_gather(program, parts[0], ranks, label)]
        lengths = [part.shape[0] for part in parts]
        gathered = self.all_gather(program, tf.concat(parts, program.constant(0)), ranks, label)
        rows = tf.reshape(gathered, program.constant([len(ranks), sum(lengths)]))
        return tf.split(rows, program.constant(lengths), program.constant(1), num=len(lengths))

    def reduce_scatter_parts(
        self, program: Emission, parts: Sequence[tf.Tensor], ranks: Ranks, label: str, dtype: tf.DType
    ) -> list[tf.Tensor]:
        """Reduce-scatters several (N, L) of one dtype in one collective; returns of each this rank's (L,), as `dtype`."""
        if len(parts) == 1:
            return [self.reduce_scatter(program, parts[0], ranks, label, dtype)]
        lengths = [part.shape[1] for part in parts]
        reduced = self.reduce_scatter(program, tf.concat(parts, program.constant(1)), ranks, label, dtype)
        return tf.split(reduced, program.constant(lengths), program.constant(0), num=len(lengths))


def transport_of(program: Emission, ranks: Ranks) -> Transport:
    """Returns how the collectives of the group of `ranks` travel: every `Carrier` is a `Transport`."""
    return cast(Transport, program.transport_of(ranks))


def sum_dtype(dtype: tf.DType) -> tf.DType:
    """Returns in which dtype a sum of what travelled as `dtype` is taken: a half-precision wire does not mean such a sum."""
    return tf.float32 if dtype in (tf.bfloat16, tf.float16) else dtype
