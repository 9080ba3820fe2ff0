"""Control edges that limit how many full gradients of one backward pass exist at once.

Backward would outrun the chain of collectives that reduces them, and all full gradients would exist at once, as in stage 1. So a
gradient is not computed before an earlier one has been reduced: the one two messages before it. Where ranks meet in memory and
gradients are large, it is the one right before: moving them takes the cores that compute, and the next would gain little.

Where gradients travel compressed over a link, a full one is gone when it is encoded, long before it is reduced:

    computed   0   1   2   3   4       5           6
    encoded      0   1   2   3   4       5
    sent         | message 0 | message 1 | message 2 | ...         the next one is always there

So a gradient waits until the message two before is encoded, and the one four before is reduced: the gradients of two exist in
full, and those of two more encoded; what arrives is decoded, as large as a full one. With error feedback a gradient is gone when
what its message loses has been encoded, too.

What waits keeps what it is computed from. So a gradient that is smaller than that, as of a convolution's filters, does not wait,
nor for its gathered parameters to be read and freed, which are as small.
"""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.graphs import tape
from tfdist.placements.table import moved_inputs

# Of a message. Waiting seems to cost 1 to 2 % of a step, which smaller gradients are not worth.
_LARGE_BYTES = 8 * 2**20


class GradientsInFlight:
    """The full gradients of one backward pass, by the messages in which they are reduced over the data axis.

    What is made to wait was made after all gradients of the messages that have been emitted, and after all collectives that
    stood on the rank's chain before them. It cannot be what these wait for: the new edges close no cycle.

    Args:
        messages: the gradients of each, in the order in which they are emitted.
        numbers: the place in the graph, by name, of every operation.
        program: that of the rank.

    Attributes:
        most: how many messages' gradients may exist at once, in full.
    """

    def __init__(self, messages: Sequence[Sequence[tf.Tensor]], numbers: Mapping[str, int], program: RankProgram):
        self._messages = messages
        self._numbers = numbers
        largest = max((sum(x.shape.num_elements() * x.dtype.size for x in message) for message in messages), default=0)
        holds_thread = program.transport_of(program.group_ranks("data")).holds_thread
        self.most = 1 if largest > _LARGE_BYTES and holds_thread else 2
        self._emitted = 0
        self._encoded: Sequence[tf.Operation] = ()
        on_chain = program.graph.capture(program.token()).consumers()
        self._latest = max((numbers[operation.name] for operation in on_chain), default=-1)

    def note_emitted(self, encoded: Sequence[tf.Operation]) -> int:
        """Notes that the next message has been emitted; returns the first that may not be computed while its gradients exist.

        Args:
            encoded: the operations after which these are no longer needed; none: they are until the message is reduced.
        """
        message = self._messages[self._emitted]
        self._latest = max(self._latest, *(self._numbers[gradient.op.name] for gradient in message))
        self._emitted += 1
        self._encoded = encoded
        return self._emitted + self.most - 1

    def compute_after(self, number: int, operations: Sequence[tf.Operation]) -> None:
        """Lets message `number`, not emitted yet, be computed after those of `operations` that stand before it in the graph, but
        for gradients that are smaller than what they are computed from."""
        for gradient in self._messages[number]:
            found = _computed_by(gradient.op, -1, self._numbers)
            for computing in (one for one in found if not tape.reads_more_than_it_makes(one)):
                for operation in operations:
                    if self._numbers[operation.name] < self._numbers[computing.name]:
                        tape.run_after(computing, operation)

    def hold_back(self, number: int, after: tf.Operation) -> None:
        """Lets message `number`, if there is one, be computed after operation `after`, of the message emitted last; or where that
        is encoded, when it has been, and a later one after `after`. Gradients smaller than what they are computed from do not
        wait."""
        if self._encoded and self.most > 1:
            for operation in self._encoded:
                self._compute_behind(number, operation)
            number += self.most
        self._compute_behind(number, after)

    def _compute_behind(self, number: int, after: tf.Operation) -> None:
        for gradient in self._messages[number] if number < len(self._messages) else ():
            for operation in _computed_by(gradient.op, self._latest, self._numbers):
                if not tape.reads_more_than_it_makes(operation):
                    tape.run_after(operation, after)


def _computed_by(operation: tf.Operation, latest: int, numbers: Mapping[str, int]) -> list[tf.Operation]:
    """Returns `operation`, or those whose results it only rearranges, where they were made after number `latest` as well."""
    if numbers[operation.name] <= latest:
        return []
    moved = [operation.inputs[place] for place in moved_inputs(operation.type, len(operation.inputs))]
    sources = [tensor.op for tensor in moved if tensor.dtype.is_floating]
    return [found for source in sources for found in _computed_by(source, latest, numbers)] or [operation]
