"""Messages between two devices of one process: plain edges of the graph.

They cost nothing between logical CPUs and one copy between GPUs. Ranks are traced one after the other, and each may need what a
later one makes: such a receiver gets a stand-in, which is connected to the real tensor when that is made.
"""

import tensorflow as tf

from tfdist import errors
from tfdist.collectives.emission import Emission
from tfdist.collectives.transports.transport import MessageTransport

_Message = tuple[int, int, str]  # source, destination, label


class GraphEdges(MessageTransport):
    """The messages between ranks of this process in one trace, of which its plan has one."""

    def __init__(self) -> None:
        self._sent: dict[_Message, tf.Tensor] = {}
        self._awaited: dict[_Message, tf.Tensor] = {}

    def send(self, program: Emission, x: tf.Tensor, destination: int, label: str) -> None:
        message = (program.rank, destination, label)
        self._sent[message] = x
        stand_in = self._awaited.pop(message, None)
        if stand_in is None:
            return
        if stand_in.dtype != x.dtype or not stand_in.shape.is_compatible_with(x.shape):
            raise errors.runtime_error(
                f"Rank {destination} expects {label!r} to be {stand_in.dtype.name}{stand_in.shape}, but rank {program.rank} "
                f"sends {x.dtype.name}{x.shape}."
            )
        stand_in.op._update_input(0, x)

    def receive(self, program: Emission, spec: tf.TensorSpec, rows: tf.Tensor, source: int, label: str) -> tf.Tensor:
        message = (source, program.rank, label)
        if message in self._sent:
            received = tf.identity(self._sent[message])
            received.set_shape(spec.shape)
            return received
        static = [1 if size is None else size for size in spec.shape]
        stand_in = tf.compat.v1.placeholder_with_default(tf.zeros(static, spec.dtype), spec.shape)
        self._awaited[message] = tf.identity(stand_in)
        return self._awaited[message]

    def check_complete(self) -> None:
        """Raises RuntimeError when a rank waits for what no rank sends."""
        if self._awaited:
            source, destination, label = next(iter(self._awaited))
            raise errors.runtime_error(f"Rank {destination} waits for {label!r}, which rank {source} never sends.")
