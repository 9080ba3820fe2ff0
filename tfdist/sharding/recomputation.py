"""Functions within a step that are computed a second time for backward, so that what they compute is not kept until then.

    forward     x -> a -> b -> y              x and y are kept, a and b dropped
    backward    dy, x -> a' -> b'             when dy is there, and the backward before it is through
                dy, a', b' -> dx              what would read a and b reads a' and b'

Note: operations made again. The function is not called a second time: when the tape asks for the gradient of its results, the
operations that it made are made again, and the operations of backward that read a result of the first ones are made to read the
second. So both are the same numbers, whatever the function is: what it draws at random, it draws once. Nothing that has an effect
or sends anything is made again, nor a loop, a branch or a nested function: what they return is kept. Operations that nobody reads
(the last product of a layer) do not run.

Note: what is gathered again. A parameter that is sharded over the data axis is not kept until then either: the operations made
again read it in backward, and so it is gathered for them as for the others there (`tfdist.sharding.unshard`), once for both.

Note: gradients of weights before. That of a last layer's bias reads the logits, and nothing waits for it: where it is queued
after what is computed again, the logits are there besides. So a region waits for gradients that are smaller than what they are
computed from; none of them waits for a collective (`tfdist.sharding.gradients_in_flight`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import OfBranch, RankProgram
from tfdist.graphs import tape
from tfdist.sharding.sharded_activations import copy_mask, mark_shard, shard_of


@dataclasses.dataclass(eq=False)
class Repetition:
    """The operations of a region, made again for one gradient.

    Attributes:
        began: how many operations the graph had before.
        gate: an operation that runs before any of them.
        operations: those made again.
        copies: the tensor that stands for each of the region's, by the name of that.
        is_placed: whether it waits for gradients of weights that backward has computed before it.
    """

    began: int
    gate: tf.Operation
    operations: list[tf.Operation]
    copies: dict[str, tf.Tensor]
    is_placed: bool = False


@dataclasses.dataclass(eq=False)
class Region:
    """The region of one call of a function: the operations that can be made again, and the tensors of it that are dropped."""

    operations: list[tf.Operation]
    dropped: list[tf.Tensor]
    repetitions: list[Repetition] = dataclasses.field(default_factory=list)


class Recomputation(OfBranch):
    """Recomputation of one rank in one trace of `strategy.run`. A part of its state.

    Attributes:
        idle: the names of operations made again that nothing needs; they do not run.
    """

    def __init__(self, program: RankProgram):
        self._program = program
        self._regions: list[Region] = []  # of a region within a region, the inner one first
        self._left_alone: set[str] = set()
        self.idle: set[str] = set()

    def leave_alone(self, operations: Sequence[tf.Operation]) -> None:
        """Notes operations that are not made again: of a gather, which has a second one of its own."""
        self._left_alone.update(operation.name for operation in operations)

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns `function(*args, **kwargs)`, of which arguments and results are kept for backward, and nothing in between.

        Where there is no backward, or it is not traced in the graph of `strategy.run`, the function is just called.
        """
        program = self._program
        before = tape.operations_so_far()
        result = function(*args, **kwargs)
        leaves = tf.nest.flatten(result, expand_composites=True)
        outputs = [leaf for leaf in leaves if tf.is_tensor(leaf) and leaf.dtype.is_floating]
        if program.is_eager or not outputs or not tape.tapes_watching(outputs):
            return result
        program.not_on_trial("recomputation")  # of which the graph of a step alone knows the order
        outputs = [output for output in outputs if program.exists_here(output)]
        if tf.compat.v1.get_default_graph() is not program.graph or not outputs:
            return result
        again = [op for op in tape.operations_since(before) if op.name not in self._left_alone and tape.can_be_made_again(op)]
        kept = {output.name for output in outputs}
        region = Region(again, [tensor for op in again for tensor in op.outputs if tensor.name not in kept])
        with tape.stop_recording():
            passed = {id(output): tf.identity(output) for output in outputs}
        tape.record_gradient("Recompute", list(passed.values()), outputs, functools.partial(self._repeat, region))
        for output in outputs:
            copy_mask(output, mark_shard(passed[id(output)], shard_of(output)))
        self._regions.append(region)
        return tf.nest.pack_sequence_as(result, [passed.get(id(leaf), leaf) for leaf in leaves], expand_composites=True)

    def _repeat(self, region: Region, *upstream: Any) -> list[Any]:
        """The tape's way back through a region's results: makes its operations again, once `upstream` is there."""
        if tf.compat.v1.get_default_graph() is self._program.graph:
            before = [tensor for tensor in tf.nest.flatten(list(upstream), expand_composites=True) if tensor is not None]
            began = tape.operations_so_far()
            with self._program.outermost(), tape.stop_recording(), tape.backward_scope("recompute"):
                with tf.control_dependencies(before):
                    gate = tf.no_op()
                copies = {x.name: x for operation in region.operations for x in operation.inputs}
                tape.copy_all(region.operations, copies)
            made = tape.operations_since(began)[1:]
            tape.run_all_after(made, [gate])
            region.repetitions.append(Repetition(began, gate, made, copies))
        return list(upstream)

    def close(self, outputs: Any) -> None:
        self.connect([])

    def connect(self, gradients: Sequence[tf.Tensor] | None = None) -> None:
        """Lets what backward has made so far read the operations made again, each when its turn has come.

        Args:
            gradients: those of weights that are wanted, besides those that are sent or written already; None: not known yet.
        """
        repetitions = sorted((r for region in self._regions for r in region.repetitions), key=lambda r: r.began)
        if not repetitions:
            return
        operations = self._program.graph.get_operations()
        numbers = {op.name: number for number, op in enumerate(operations)}
        of_loops = tape.made_for_loops(operations, since=repetitions[0].began)
        for region in self._regions:
            for tensor, consumer in region_readers(region.dropped) if region.repetitions else ():
                latest = [r for r in region.repetitions if r.began <= numbers[consumer.name]]
                if latest and consumer not in of_loops:
                    tape.reconnect(consumer, tensor, latest[-1].copies[tensor.name])
        made = {op for repetition in repetitions for op in repetition.operations}
        read = [op for op in made if any(reader not in made for output in op.outputs for reader in output.consumers())]
        self.idle = {op.name for op in made - tape.ancestors(read, list(made), by_control=False)}
        for earlier, later in zip(repetitions, repetitions[1:], strict=False):
            self._order(earlier, later, numbers)
        if gradients is not None and not all(repetition.is_placed for repetition in repetitions):
            self._place(repetitions, [*gradients, *filter(tape.has_an_effect, operations)], operations)

    def connect_alone(self) -> None:
        """As `connect`, of a backward that is through, and has a place of its own in the order of the step.

        What comes after it may run before parts of it, which then wait for their turn: it is not put after them.
        """
        self.connect()
        self._regions = [region for region in self._regions if not region.repetitions]

    def _order(self, earlier: Repetition, later: Repetition, numbers: Mapping[str, int]) -> None:
        """Lets the repetition of one region wait until backward has read that of the region before: else both would be held.

        Waited for is only what was made before: the new edges close no circle.
        """
        own, known = set(earlier.operations), set(later.gate.control_inputs)
        for _, reader in region_readers([output for operation in earlier.operations for output in operation.outputs]):
            is_before = numbers[reader.name] < later.began
            if is_before and reader not in own and reader not in known and reader.name not in self.idle:
                known.add(reader)
                tape.run_after(later.gate, reader)

    def _place(
        self,
        repetitions: Sequence[Repetition],
        wanted: Sequence[tf.Tensor | tf.Operation],
        operations: Sequence[tf.Operation],
    ) -> None:
        """Lets each repetition wait for what backward has computed before it, on the way to what is `wanted`, and of more than it
        is itself.

        Only on the rank's own device: other ranks of the process are traced in the same graph. And once for each: later the
        operations between collectives may have been put in another order (`queue_order`).
        """
        needed = tape.ancestors(wanted, operations, by_control=False)
        start = 0
        for repetition in repetitions:
            before, start = operations[start : repetition.began], repetition.began
            waited_for = tape.ancestors([repetition.gate], before)
            for operation in before if not repetition.is_placed else ():
                is_own = operation.device == repetition.gate.device and tape.is_backward(operation)
                is_left = is_own and operation in needed and operation not in waited_for
                if is_left and tape.reads_more_than_it_makes(operation):
                    tape.run_after(repetition.gate, operation)
            repetition.is_placed = True


def region_readers(tensors: Sequence[tf.Tensor]) -> Iterator[tuple[tf.Tensor, tf.Operation]]:
    """Yields each of `tensors` with each operation that reads it."""
    for tensor in tensors:
        for consumer in tensor.consumers():
            yield tensor, consumer
