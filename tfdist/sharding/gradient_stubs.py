"""Gradients of sharded parameters while a step is traced: stubs of the parameter's shape, filled when they are read.

The gradient of a sharded parameter is summed over the data ranks, of which each keeps its shard. A stub becomes what the
code's use of it asks for: a table in docs/design/gradient.md.

Gathering makes all gradients exist whole, as at stage 1, and adds a third to what a step sends.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import OfBranch, RankProgram
from tfdist.collectives.transports.kernel_settings import with_zeros
from tfdist.graphs import tape
from tfdist.placements import table
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import Replicate
from tfdist.sharding import gradient_graph
from tfdist.sharding.carried_gradients import CarriedGradients
from tfdist.sharding.gradient_numbers import GradientNumbers
from tfdist.sharding.gradient_state import GradientState
from tfdist.sharding.gradient_weight import GradientWeight, without_weight
from tfdist.sharding.known_sums import KnownSums
from tfdist.sharding.layout import Layout
from tfdist.sharding.shard_messages import gather_shards_in_buckets
from tfdist.sharding.units import Unit


@dataclasses.dataclass(eq=False)
class Stub:
    """A stand-in for the gradient of a sharded parameter, of the parameter's shape.

    Attributes:
        tensor: what the tape has returned.
        full: this rank's summand, of the parameter's shape.
        weight: what that counts already; None: nothing.
        unit: what gathers the parameter, if the stub waits to be reduced with it.
        shard: this rank's of the sum, flat (L,); None until it is reduced.
        state: how far the gradient has come; what reads a `WHOLE` one reads the sum.
    """

    tensor: tf.Tensor
    variable: Any
    full: tf.Tensor
    weight: tf.Tensor | None
    unit: Unit | None = None
    shard: tf.Tensor | None = None
    state: GradientState = GradientState.SUMMAND


class _OnShards(gradient_graph.Derived):
    """The layout of each tensor that is an elementwise function of sums of one layout, and of scalars: as good on shards (L,)."""

    def __init__(self, leaf: Callable[[tf.Tensor], Layout | None], program: RankProgram):
        super().__init__(leaf)
        self._coordinate = program.mesh.coordinate(program.rank)

    def of_result(self, operation: tf.Operation, found: Sequence[Layout | None]) -> Layout | None:
        layouts = {x for x in found if x is not None}
        others = [x for x, layout in zip(operation.inputs, found, strict=True) if layout is None]
        return layouts.pop() if len(layouts) == 1 and all(gradient_graph.scalar_of(x) is not None for x in others) else None

    def _is_of_kind(self, tensor: tf.Tensor) -> bool:
        return table.is_elementwise(tensor.op.type)

    def _beside(self, tensor: tf.Tensor) -> tf.Tensor:
        return gradient_graph.scalar_of(tensor)

    def _finished(self, image: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
        """Returns a shard whose padding is zeros again, where the function has made something else of it."""
        layout = self.of(output)
        start, stop = layout.flat_range(self._coordinate)
        missing = layout.shard_elements - (stop - start)
        return with_zeros(image[: stop - start], missing) if missing else image


class GradientStubs(OfBranch):
    """The stubs of one rank's program in one trace. A part of its state."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._stubs: dict[str, Stub] = {}
        self._linear = gradient_graph.Derived(
            lambda x: frozenset([self._stubs[x.name]]) if x.name in self._stubs else None, is_of_tapes=True, program=program
        )
        self._layouts = _OnShards(lambda x: self._stubs[x.name].variable.layout if x.name in self._stubs else None, program)
        self._get_sums: set[str] = set()  # the handles of parameters, and of slots that the user's code assigns to
        self._images: dict[str, tf.Tensor] = {}  # shards by the name of the whole tensor that they are of
        self._sources = gradient_graph.Sources(lambda x: x.graph is program.graph and x.name in self._stubs)

    @property
    def waiting(self) -> list[Stub]:
        """Those that are not reduced yet."""
        return [stub for stub in self._stubs.values() if stub.state is GradientState.SUMMAND]

    def make(self, variable: Any, full: tf.Tensor, unit: Unit | None = None) -> Stub:
        """Returns a stub for the gradient of `variable`, of which `full` is this rank's summand; it is reduced with `unit`."""
        tensor = tape.stand_in(variable.dtype, variable.layout.local_shape)
        self._program.part(GradientNumbers).note(tensor)
        began_with = self._program.part(GradientWeight).began_with
        self._stubs[tensor.name] = Stub(tensor, variable, full, began_with, unit)
        return self._stubs[tensor.name]

    def note_gets_sum(self, handle: tf.Tensor) -> None:
        """Notes that `handle` is of a variable that is never assigned a summand: a parameter, or a slot, of which the rank's
        shard is cut out of what it gets."""
        self._get_sums.add(self._program.graph.capture(handle).name)

    def gets_summand(self, operation: tf.Operation, tensor: tf.Tensor) -> bool:
        """Whether `operation` adds `tensor`, linear in gradients, to a variable in a custom training loop: the summand."""
        is_of_trainer = self._program.part(GradientWeight).is_of_trainer
        handles = None if is_of_trainer else gradient_graph.written(operation, tensor)
        return handles is not None and not any(handle.name in self._get_sums for handle in handles)

    def note_reduced(self, stub: Stub, shard: tf.Tensor) -> None:
        """Notes that `shard` is this rank's of the sum that `stub` stands for."""
        stub.state = GradientState.SHARD
        stub.shard = self._images[stub.tensor.name] = shard

    def summand(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns this rank's summand of `tensor`, where that is a gradient, or linear in gradients.

        Raises NotImplementedError in an eager run for what was computed of gradients.
        """
        if not tf.is_symbolic_tensor(tensor):
            return self._program.part(KnownSums).summand_of(tensor) if self._program.is_eager else None
        if not self._stubs or self._linear.of(tensor) is None:
            return None
        with self._program.outermost():
            summand = self._summand(tensor)
        if self._program.outer is not None:
            self._program.part(CarriedGradients).note(summand)
        return summand

    def shard_of(self, gradient: tf.Tensor) -> tf.Tensor | None:
        """Returns this rank's shard of `gradient`: of a sum, or of what elementwise operations make of sums; None: of neither."""
        is_here = tf.is_symbolic_tensor(gradient) and gradient.graph is self._program.graph
        if not is_here or self._layouts.of(gradient) is None:
            return None
        if gradient.name in self._images:
            return self._images[gradient.name]
        with self._program.outermost(), tape.stop_recording():
            return self._layouts.image(gradient, self._images)

    def below(self, tensor: tf.Tensor) -> list[Stub]:
        """Returns the stubs that `tensor` is computed from, in one order on all ranks."""
        names = self._sources.of(tensor) if self._stubs and tf.is_symbolic_tensor(tensor) else None
        return [stub for name, stub in self._stubs.items() if name in names] if names else []

    def needs_sums(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is computed of what stubs stand for, and not linear in it."""
        return bool(self.below(tensor)) and self._linear.of(tensor) is None

    def fill_what_is_read(self) -> None:
        """Fills the stubs that have been reduced and are read by more than what an optimizer does on shards."""
        missing = [stub for stub in self._stubs.values() if stub.state is GradientState.SHARD]
        self.fill([stub for stub in missing if not all(gets_summand for *_, gets_summand in self._readers(stub.tensor))])

    def write_summands(self) -> None:
        """Lets variables that are written in a custom training loop get this rank's summands."""
        for stub in self._stubs.values():
            for operation, tensor, gets_summand in list(self._readers(stub.tensor)):
                if gets_summand:
                    tape.reconnect(operation, tensor, self._summand(tensor))

    def give_values(self) -> None:
        """Gives stubs that are not filled a value, since an operation may need all that it is given, whatever is read of it."""
        with self._program.outermost(), tape.stop_recording():
            for stub in self._stubs.values():
                if stub.state is not GradientState.WHOLE and stub.tensor.consumers():
                    _connect(stub, self._summand(stub.tensor))

    def _readers(self, tensor: tf.Tensor) -> Iterator[tuple[tf.Operation, tf.Tensor, bool]]:
        """Yields what reads `tensor`, or an elementwise function of it, and is none itself: the operation, what it reads, and
        whether it gets this rank's summand, and not the sum."""
        for operation in tensor.consumers():
            if self._linear.of(tensor) is not None and self.gets_summand(operation, tensor):
                yield operation, tensor, True
                continue
            is_only_written, after = self._is_only_written(operation), list(operation.outputs)
            if operation.type == "IdentityN":  # whose outputs depend on an input each
                after = [y for x, y in zip(operation.inputs, operation.outputs, strict=True) if tape.same(x, tensor)]
            followed = [x for x in after if is_only_written or self._layouts.of(x) is not None]
            for x in followed:
                yield from self._readers(x)
            if len(followed) < len(after) or not operation.outputs:
                yield operation, tensor, False

    def _is_only_written(self, operation: tf.Operation) -> bool:
        """Whether what `operation` returns is linear in stubs, and goes to variables, as `gets_summand` says, nowhere else."""
        return bool(operation.outputs) and all(
            bool(output.consumers())
            and self._linear.of(output) is not None
            and all(self.gets_summand(reader, output) or self._is_only_written(reader) for reader in output.consumers())
            for output in operation.outputs
        )

    def _summand(self, tensor: tf.Tensor) -> tf.Tensor:
        summands, found = {}, self._linear.of(tensor)
        for stub in [stub for stub in self._stubs.values() if stub in found]:  # in one order on all ranks
            summands[stub.tensor.name] = without_weight(tf.cast(stub.full, stub.tensor.dtype), stub.weight)
        return self._linear.image(tensor, summands)

    def fill(self, stubs: Sequence[Stub]) -> None:
        """Fills `stubs`, which have been reduced: what is computed from them is then the same on all ranks."""
        stubs = [stub for stub in stubs if stub.state is not GradientState.WHOLE]
        shards, layouts = [stub.shard for stub in stubs], [stub.variable.layout for stub in stubs]
        with self._program.outermost(), tape.stop_recording():
            for place, whole in gather_shards_in_buckets(self._program, shards, layouts, 8 * 2**20, "all_gather/gradient"):
                stub = stubs[place]
                stub.state = GradientState.WHOLE
                _connect(stub, whole)
                self._program.part(Facts).declare(stub.tensor, Replicate())


def _connect(stub: Stub, value: tf.Tensor) -> None:
    tape.reconnect(stub.tensor.op, stub.tensor.op.inputs[0], value)
