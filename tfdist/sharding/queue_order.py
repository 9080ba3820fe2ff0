"""In which order a rank's operations are queued on its device.

It is the order in which they were made, but for one thing. A tensor-parallel layer's backward pass sends activations, which the
products of the layer before wait for. Gradients of weights need not be there by then: computed behind the collective, they hide
it, and they hide the messages of other gradients in the same way.

    made       dX 1   dW 1   dX 0   dW 0   all-reduce of dX 0
    queued     dX 1   dX 0   all-reduce of dX 0   dW 1   dW 0        (products of the layer before follow when that is over)

A device that begins a collective waits for all that is queued until then (`tfdist.sharding.host_lead`). So gradients of weights
are queued when the device has computed what the collective sends, and so after it has begun.

Note: no circle. Of the operations between two such collectives those that the second needs come first, each after all that it
needs itself; then the others. That is an order of all operations which no edge contradicts, and all that `host_lead`, the
prefetching of parameters and the limit of full gradients add leads from what is earlier in it to what is later. Ranks that run a
collective together have traced the same operations, and so have the same order.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.sharding import host_lead, tape
from tfdist.sharding.recomputation import Recomputation


class QueueOrder:
    """That of one trace; what has a place in it keeps it. An attachment of the rank's program.

    Attributes:
        borders: the places of the operations that end what lies between two collectives.
    """

    IS_OF_BRANCH = True

    def __init__(self, program: RankProgram):
        self._program = program
        self._operations: list[tf.Operation] = []
        self.borders: list[int] = []

    def operations(self, gradients: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """Returns all operations of the graph, in this order.

        Args:
            gradients: those of weights; what only they need, of the operations made since the last call, is held back as above.
        """
        begins_by_itself = host_lead.begins_by_itself(self._program)
        if begins_by_itself:
            # Of what is computed again the order is a matter of edges alone.
            self._program.attachment(Recomputation).settle(gradients)
        made = self._program.graph.get_operations()[len(self._operations) :]
        if begins_by_itself:
            needed = tape.ancestors(gradients, made, by_control=False)
            segment: list[tf.Operation] = []
            for operation in made:
                segment.append(operation)
                if operation in needed and tape.is_backward(operation) and operation.type.startswith("Collective"):
                    self._operations += self._begun_first(operation, segment, needed)
                    self.borders.append(len(self._operations) - 1)
                    segment = []
            made = segment
        self._operations += made
        return list(self._operations)

    def _begun_first(
        self, collective: tf.Operation, segment: Sequence[tf.Operation], needed: Set[tf.Operation]
    ) -> list[tf.Operation]:
        """Returns `segment`, which ends with `collective`, in order, and has what the collective does not need held back."""
        in_turn = [operation for operation in segment if tape.has_a_turn(operation)]  # TensorFlow keeps the order of these
        before = tape.ancestors([collective, *in_turn], segment)
        others = [operation for operation in segment if operation not in before]
        sent = [tensor.op for tensor in collective.inputs if tensor.dtype != tf.resource and tensor.op in before]
        held = host_lead.computing([operation for operation in others if operation in needed], collective.device)
        if sent:
            host_lead.run_when_done(held, sent, self._program, "activations")
        return [*(operation for operation in segment if operation in before), *others]
