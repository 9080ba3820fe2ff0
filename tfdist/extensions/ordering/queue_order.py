"""In which order a rank's operations are queued on its device.

It is the order in which they were made, but for one thing. A tensor-parallel layer's backward pass sends activations, which the
products of the layer before wait for. Gradients of weights need not be there by then: computed after the collective, they hide
it, and they hide the messages of other gradients in the same way.

    made       dX 1   dW 1   dX 0   dW 0   all-reduce of dX 0
    queued     dX 1   dX 0   all-reduce of dX 0   dW 1   dW 0        (products of the layer before follow when that is over)

A device that begins a collective waits for all that is queued until then (`host_run_ahead`). So gradients of weights
are queued when the device has computed what the collective sends, and so after it has begun.

Between processes collectives stand on a chain. There those of activations are on the side chain (`side_chain`) until those of
gradients have been emitted, and each of these gets its place in the same order: after what it sends. So it is in forward with
gathers of parameters (stage 3), which are emitted after the activations that their own layers read:

    emitted    gather 0   activations 0   gather 1   activations 1   gather 2   activations 2   gather 3
    chain      gather 0   gather 1   activations 0   gather 2   activations 1   gather 3   activations 2

Note: no circle. Of the operations between two such collectives those that the second needs come first, each after all that it
needs itself; then the others. That is an order of all operations which no edge contradicts, and all that `host_run_ahead`, the
prefetching of parameters and the limit of full gradients add leads from what is earlier in it to what is later. A gather of
forward is earlier than where it was made, but after all that it waits for; of parameters that a step has written it is not known
what they wait for, and they are gathered where they are read. Ranks that run a
collective together have traced the same operations, and so have the same order.
"""

import bisect
import contextlib
from collections.abc import Iterator, Sequence, Set

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.collectives.step_order import NoOrder
from tfdist.extensions.ordering import host_run_ahead
from tfdist.extensions.ordering.side_chain import LANE, SideChain, side_of
from tfdist.graphs import tape
from tfdist.sharding.recomputation import Recomputation


class QueueOrder(NoOrder):
    """That of one trace; what has a place in it keeps it. A field of the rank's program, and of a branch's.

    Attributes:
        sends_activations_first: whether the order is another than that in which operations were made. On a chain only
            where no ranks of the axis "pipe" have messages in its order, too.
        borders: the operations that end what lies between two collectives; on a chain these collectives themselves.
    """

    _program: RankProgram

    def __init__(self, program: RankProgram):
        super().__init__(program)
        self._operations: list[tf.Operation] = []
        self.side: SideChain = SideChain(program) if program.outer is None else side_of(program.outer)
        self.is_limited, self.is_on_chain = host_run_ahead.is_limited(program), host_run_ahead.is_on_chain(program)
        is_aside = self.is_on_chain and program.mesh.pipeline_parallel_size == 1 and program.outer is None
        self._is_aside = is_aside and program.mesh.tensor_parallel_size > 1
        self.sends_activations_first = host_run_ahead.begins_by_itself(program) or self._is_aside
        self._has_gathers = False

    def may_be_overtaken(self) -> contextlib.AbstractContextManager[None]:
        """A block whose collectives, of activations, are on the side chain where a chain would have them before all others.

        In backward, and in forward where parameters are gathered.
        """
        is_here = self._is_aside and (self._has_gathers or tape.in_backward()) and self._is_in_graph()
        return self.side.on_side_chain() if is_here and not tape.in_vectorized_map() else contextlib.nullcontext()

    @contextlib.contextmanager
    def ahead(self, gate: Sequence[tf.Operation], following: Sequence[tf.Operation]) -> Iterator[None]:
        """A block whose collectives gather parameters in forward: they stand where the operations `gate` are over.

        After the activations that these end in, for which what comes next waits: `following` reads the parameters after those
        that `gate` reads.
        """
        if not self._is_aside or not self._is_in_graph() or self.has_written:
            yield
            return
        self._has_gathers = True
        with self.side.block() as block:
            yield
        numbers = {operation.name: number for number, operation in enumerate(self._program.graph.get_operations())}
        side = [numbers[operation.name] for operation in self.side.collectives()]
        needed = [numbers[operation.name] for operation in (*gate, *host_run_ahead.activations_of(gate, following))]
        block.place = bisect.bisect(side, max(needed, default=-1))

    @contextlib.contextmanager
    def among_activations(self) -> Iterator[None]:
        """A block whose collectives stand between those of the side chain, where backward has computed what they need."""
        if not self._is_aside or not self._is_in_graph():
            yield
            return
        before = tape.operations_so_far()
        with self.side.block() as block:
            yield
        block.place = self._activations_before(tape.operations_since(before))

    def note_record(self, lane: int) -> None:
        if lane == LANE:
            self.side.note_record()

    def join(self) -> None:
        self.side.join()

    def emitted(self) -> list[tf.Operation]:
        return self.side.emitted()

    def after_activations(self, readers: Sequence[tf.Operation], following: Sequence[tf.Operation]) -> list[tf.Operation]:
        return host_run_ahead.after_activations(readers, following, self._program)

    def last_on_chain(self, before: Sequence[tf.Operation]) -> list[tf.Operation]:
        return host_run_ahead.last_on_chain(before, self._program)

    def queue_after(self, first: Sequence[tf.Operation], second: Sequence[tf.Operation]) -> None:
        host_run_ahead.queue_after(first, second, self._program)

    def queue_units_in_order(self, units: Sequence[tuple[Sequence[tf.Operation], Sequence[tf.Operation]]]) -> None:
        host_run_ahead.queue_units_in_order(units, self._program)

    def gather_units_in_order(self, units: Sequence[Sequence[tf.Operation]]) -> None:
        host_run_ahead.gather_units_in_order(units, self._program)

    def limit_lead(
        self, messages: Sequence[Sequence[tf.Tensor]], operations: Sequence[tf.Operation], collectives_each: int = 1
    ) -> None:
        known = set(operations)
        borders = [border for border in self.borders if border in known]
        host_run_ahead.limit_lead(messages, self._program, operations, borders, collectives_each)

    def run_when_done(self, held: Sequence[tf.Operation], operations: Sequence[tf.Operation], kind: str) -> None:
        host_run_ahead.run_when_done(held, operations, self._program, kind)

    def on_device(self, operations: Sequence[tf.Operation], kind: str) -> tf.Operation:
        return host_run_ahead.on_device(self._program, operations, kind)

    def operations(self, gradients: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """Returns all operations of the graph, in this order.

        Args:
            gradients: those of weights; what only they need, of the operations made since the last call, is held back as above.
        """
        if self.sends_activations_first:
            # Of what is computed again the order is a matter of edges alone.
            self._program.part(Recomputation).connect(gradients)
        made = self._program.graph.get_operations()[len(self._operations) :]
        if self.sends_activations_first:
            needed = tape.ancestors(gradients, made, by_control=False)
            segment: list[tf.Operation] = []
            for operation in made:
                segment.append(operation)
                if operation in needed and tape.is_backward(operation) and operation.type.startswith("Collective"):
                    self._operations += self._begun_first(operation, segment, needed)
                    self.borders.append(operation if self._is_aside else self._operations[-1])
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
        held = host_run_ahead.computing([operation for operation in others if operation in needed], collective.device)
        if sent:
            sums_of_loss = [] if self.borders else host_run_ahead.last_on_chain([collective], self._program)
            host_run_ahead.run_when_done(held, [*sent, *sums_of_loss], self._program, "activations")
        return [*(operation for operation in segment if operation in before), *others]

    def _is_in_graph(self) -> bool:
        return tf.compat.v1.get_default_graph() is self._program.graph

    def _activations_before(self, made: Sequence[tf.Operation]) -> int:
        """Returns how many of the side chain stand before the sources of `made`, operations after backward."""
        order = self.operations([])
        places = {operation: place for place, operation in enumerate(order)}
        sent = [places[operation] for operation in self.side.collectives()]
        behind = {operation for operation in order[sent[-1] + 1 :] if not tape.is_backward(operation)} if sent else set()
        found = tape.ancestors(made, list(behind))
        sources = {source for operation in found for source in tape.inputs_of(operation)} - behind
        return bisect.bisect(sent, max((places[source] for source in sources), default=-1))
