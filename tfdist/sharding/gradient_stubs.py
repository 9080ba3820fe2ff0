"""What a tape returns for sharded parameters while a step is traced: stubs of the parameter's shape, filled when they are read.

The gradient of a sharded parameter is summed over the data ranks, of which each keeps its shard. What the user's code has in its
hands looks like one device's gradient; what becomes of it shows from what the code does with it:

    it is given to an optimizer                            the shard is used; the stub is never computed
    the same after elementwise operations (g / 4)          these are made again on the shard
    it is read by something else (a norm, a mask, a       the shards are gathered: the sum, whole, as one device has it, and the
    centred gradient, a histogram)                         same on all ranks
    it is returned from the function of the rank, added    the rank's own summand, as at other stages: the caller sums
    to a variable in a loop of one's own, or given to a
    collective by the user's code, which sums it

Gathering makes all gradients exist whole, as at stage 1, and adds a third to what a step sends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.collectives.padding import with_zeros
from tfdist.graphs import tape
from tfdist.graphs.walks import inputs_first
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import Replicate
from tfdist.sharding import gradient_graph
from tfdist.sharding.carried_gradients import CarriedGradients
from tfdist.sharding.eager_sums import EagerSums
from tfdist.sharding.gradient_numbers import GradientNumbers
from tfdist.sharding.gradient_weight import GradientWeight
from tfdist.sharding.layout import Layout
from tfdist.sharding.shard_messages import gather_shards_in_buckets

_SHAPING = ("ExpandDims", "Squeeze")


@dataclasses.dataclass(eq=False)
class _Stub:
    tensor: tf.Tensor
    layout: Layout
    full: tf.Tensor  # this rank's summand
    weight: tf.Tensor | None  # which it has been given already
    shard: tf.Tensor | None = None  # of the sum; None until it is reduced
    is_connected: bool = False  # to what its readers get
    is_whole: bool = False  # what they get is the sum


class GradientStubs:
    """The stubs of one rank's program in one trace; an attachment of the program."""

    IS_OF_BRANCH = True

    def __init__(self, program: RankProgram):
        self._program = program
        self._stubs: dict[str, _Stub] = {}
        self._linear: dict[str, bool] = {}  # what `_is_linear` has found, by name
        self._layouts: dict[str, Layout | None] = {}  # what `_layout_of` has found
        self._images: dict[str, tf.Tensor] = {}  # shards by the name of the whole tensor that they are of
        self._sources = gradient_graph.Sources(lambda x: x.graph is program.graph and x.name in self._stubs)
        program.summands.append(self._own)

    @property
    def are_made(self) -> bool:
        """Whether there are any."""
        return bool(self._stubs)

    def make(self, variable: Any, full: tf.Tensor) -> tf.Tensor:
        """Returns a stub for the gradient of `variable`, of which `full` is this rank's summand."""
        layout = variable.layout
        tensor = tape.stand_in(variable.dtype, layout.local_shape)
        self._program.attachment(GradientNumbers).note(tensor)
        self._stubs[tensor.name] = _Stub(tensor, layout, full, self._program.attachment(GradientWeight).began_with)
        return tensor

    def note_reduced(self, tensor: tf.Tensor, shard: tf.Tensor) -> None:
        """Notes that `shard` is this rank's of the sum that the stub `tensor` stands for."""
        self._stubs[tensor.name].shard = shard
        self._images[tensor.name] = shard

    def _own(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns this rank's summand of `tensor`, where that is a gradient, or linear in gradients.

        Raises NotImplementedError in an eager run for what was computed of gradients.
        """
        if not tf.is_symbolic_tensor(tensor):
            return self._program.attachment(EagerSums).summand_of(tensor)
        if not self._stubs or not self._is_linear(tensor):
            return None
        with self._program.outermost():
            return self._summand(tensor)

    def is_read(self, tensor: tf.Tensor) -> bool:
        """Whether an operation reads the stub `tensor`."""
        return bool(tensor.consumers())

    def shard_of(self, gradient: tf.Tensor) -> tf.Tensor | None:
        """Returns this rank's shard of `gradient`: of a sum, or of what elementwise operations make of sums; None: of neither."""
        if not tf.is_symbolic_tensor(gradient):
            return self._program.attachment(EagerSums).shard_of(gradient)
        return self._image(gradient) if gradient.graph is self._program.graph and self._layout_of(gradient) else None

    def below(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Returns the stubs that `tensor` is computed from."""
        return self._sources.of(tensor) if self._stubs and tf.is_symbolic_tensor(tensor) else []

    def of_sums(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is computed of sums, and is no summand."""
        below = [] if not self._stubs or self._is_linear(tensor) else self.below(tensor)
        return any(self._stubs[source.name].is_whole for source in below)

    def fill(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Fills the stubs `tensors`, which have been reduced: what is computed from them is then the same on all ranks.

        Returns:
            Whether there are any.
        """
        names = {tensor.name for tensor in tensors}
        # In one order on all ranks.
        self._gather([stub for name, stub in self._stubs.items() if name in names and not stub.is_connected])
        return bool(tensors)

    def fill_what_is_read(self) -> None:
        """Fills the stubs that have been reduced and are read by more than what an optimizer does on shards."""
        self._gather([stub for stub in self._stubs.values() if self._is_missing(stub) and self._is_read_whole(stub.tensor)])

    def fill_what_is_returned(self, outputs: Sequence[tf.Tensor]) -> None:
        """Lets stubs that are returned, and read by nothing that wants the sum, be this rank's summands; what is written too."""
        for stub in self._stubs.values():
            self._write_summands(stub.tensor)
        for output in outputs:
            for tensor in self.below(output):
                stub = self._stubs[tensor.name]
                if not stub.is_connected and not self._is_read_whole(tensor):
                    self._connect(stub, self._summand(tensor))
                    if self._program.outer is not None:
                        self._program.attachment(CarriedGradients).note(tensor)

    def return_summands(self, outputs: Sequence[tf.Tensor]) -> None:
        """Lets what is returned be this rank's summands, too, where something else reads the sums: that goes on reading them."""
        number = {op.name: number for number, op in enumerate(self._program.graph.get_operations())} if self._stubs else {}
        wanted = [
            output
            for output in {x.name: x for x in outputs}.values()
            if any(self._stubs[tensor.name].is_whole for tensor in self.below(output)) and self._is_linear(output)
        ]
        # What is computed of another output comes before that.
        for output in sorted(wanted, key=lambda x: -number.get(x.op.name, 0)):
            with self._program.outermost(), tape.stop_recording():
                self._part(output)
            if self._program.outer is not None:
                self._program.attachment(CarriedGradients).note(output)

    def let_go(self, outputs: Sequence[tf.Tensor]) -> None:
        """Lets no `tf.custom_gradient` pass on what is computed from stubs that are not filled, where nobody reads it."""
        waiting = [stub.tensor for stub in self._stubs.values() if not stub.is_connected]
        seen = {tensor.name for tensor in (*waiting, *outputs)}
        while waiting:
            tensor = waiting.pop()
            for operation in tensor.consumers():
                with self._program.outermost():
                    is_let_go = tape.pass_nothing_on(operation, tensor)
                after = [] if is_let_go else [output for output in _after(operation, tensor) if output.name not in seen]
                seen.update(output.name for output in after)
                waiting += after

    def _part(self, output: tf.Tensor) -> None:
        """Makes `output`, linear in stubs, of summands, and what reads it read the same of the sums."""
        operation = output.op
        if any(result.consumers() for result in operation.outputs):
            again = tape.with_inputs(operation, list(operation.inputs))
            for result, other in zip(operation.outputs, again.outputs, strict=True):
                for reader in result.consumers():
                    tape.reconnect(reader, result, other)
        if output.name in self._stubs:
            tape.reconnect(operation, operation.inputs[0], self._summand(output))
            return
        for source in list(operation.inputs):
            if self._is_linear(source):
                tape.reconnect(operation, source, self._summand(source))

    def _is_missing(self, stub: _Stub) -> bool:
        return stub.shard is not None and not stub.is_connected

    def _layout_of(self, tensor: tf.Tensor) -> Layout | None:
        """Returns the layout of the sum that `tensor` is, or is an elementwise function of; None: it is neither."""
        for current in inputs_first(tensor, self._elementwise_inputs, self._layouts):
            self._layouts[current.name] = self._found_layout(current)
        return self._layouts[tensor.name]

    def _elementwise_inputs(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        if tensor.name in self._stubs:
            return []
        if (source := gradient_graph.passed_on(tensor)) is not None:
            return [source]
        return list(tensor.op.inputs) if gradient_graph.is_elementwise(tensor.op) else []

    def _found_layout(self, tensor: tf.Tensor) -> Layout | None:
        if tensor.name in self._stubs:
            return self._stubs[tensor.name].layout
        if (source := gradient_graph.passed_on(tensor)) is not None:
            return self._layouts[source.name]
        inputs = self._elementwise_inputs(tensor)
        layouts = {self._layouts[x.name] for x in inputs if self._layouts[x.name] is not None}
        others = [x for x in inputs if self._layouts[x.name] is None]
        return layouts.pop() if len(layouts) == 1 and all(gradient_graph.scalar_of(x) is not None for x in others) else None

    def _image(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the shard of `tensor`, which has a layout."""
        for current in inputs_first(tensor, self._sharded_inputs, self._images):
            if (source := gradient_graph.passed_on(current)) is not None:
                self._images[current.name] = self._images[source.name]
                continue
            with self._program.outermost(), tape.stop_recording():
                inputs = [
                    self._images[source.name] if self._layout_of(source) else gradient_graph.scalar_of(source)
                    for source in current.op.inputs
                ]
                made = tape.with_inputs(current.op, inputs)
                for output, image in zip(current.op.outputs, made.outputs, strict=True):
                    self._images[output.name] = self._without_padding(image, self._layout_of(current))
        return self._images[tensor.name]

    def _sharded_inputs(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        return [x for x in self._elementwise_inputs(tensor) if self._layout_of(x) is not None]

    def _without_padding(self, image: tf.Tensor, layout: Layout) -> tf.Tensor:
        """Returns a shard with zeros behind it, where an elementwise function has made something else of those."""
        start, stop = layout.flat_range(self._program.mesh.coordinate(self._program.rank))
        missing = layout.shard_elements - (stop - start)
        return with_zeros(image[: stop - start], missing) if missing else image

    def _is_read_whole(self, tensor: tf.Tensor) -> bool:
        return any(
            any(self._layout_of(output) is None or self._is_read_whole(output) for output in _after(operation, tensor))
            or not operation.outputs
            for operation in tensor.consumers()
            if not (self._gets_summand(operation, tensor) or self._is_only_written(operation))
        )

    def _is_only_written(self, operation: tf.Operation) -> bool:
        """Whether what `operation` returns has the numbers of a stub, and goes to variables as `_gets_summand` says, and nowhere
        else. Keras adds vectors to its variables so. A parameter's shard is cut out."""
        return operation.type in _SHAPING and all(
            bool(output.consumers())
            and self._is_linear(output)
            and all(self._gets_summand(reader, output) or self._is_only_written(reader) for reader in output.consumers())
            for output in operation.outputs
        )

    def _gets_summand(self, operation: tf.Operation, tensor: tf.Tensor) -> bool:
        """Whether `operation` adds `tensor` to a variable in a loop of one's own: as at other stages, this rank's summand.

        A parameter is not written so: the shard that it stores is cut out of what it gets.
        """
        if self._program.attachment(GradientWeight).is_of_trainer:
            return False
        return gradient_graph.written(operation, tensor) is not None and self._is_linear(tensor)

    def _is_linear(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is a stub, or a linear function of stubs."""
        for current in inputs_first(tensor, self._linear_inputs, self._linear):
            if current.name in self._stubs:
                self._linear[current.name] = True
            elif (source := gradient_graph.passed_on(current)) is not None:
                self._linear[current.name] = self._linear[source.name]
            else:
                self._linear[current.name] = gradient_graph.is_linear(current.op, lambda x: self._linear[x.name])
        return self._linear[tensor.name]

    def _linear_inputs(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        if tensor.name in self._stubs:
            return []
        if (source := gradient_graph.passed_on(tensor)) is not None:
            return [source]
        return list(tensor.op.inputs) if gradient_graph.may_be_linear(tensor.op) else []

    def _write_summands(self, tensor: tf.Tensor) -> None:
        for operation in tensor.consumers():
            if self._gets_summand(operation, tensor):
                tape.reconnect(operation, tensor, self._summand(tensor))
            for output in _after(operation, tensor):
                if self._layout_of(output) is not None or self._is_only_written(operation):
                    self._write_summands(output)

    def _summand(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what `tensor`, which is linear in stubs, is of this rank's summands."""
        made: dict[str, tf.Tensor] = {}
        for current in inputs_first(tensor, lambda x: [y for y in self._linear_inputs(x) if self._is_linear(y)], made):
            if current.name in self._stubs:
                stub = self._stubs[current.name]
                full = tf.cast(stub.full, current.dtype)
                weight = None if stub.weight is None else tf.cast(stub.weight, full.dtype)
                made[current.name] = full if weight is None else tf.math.divide_no_nan(full, weight)
            elif (source := gradient_graph.passed_on(current)) is not None:
                made[current.name] = made[source.name]
            else:
                inputs = [made.get(source.name, source) for source in current.op.inputs]
                made[current.name] = tape.with_inputs(current.op, inputs).outputs[current.value_index]
        return made[tensor.name]

    def _gather(self, stubs: Sequence[_Stub]) -> None:
        if not stubs:
            return
        shards, layouts = [stub.shard for stub in stubs], [stub.layout for stub in stubs]
        with self._program.outermost(), tape.stop_recording():
            for place, whole in gather_shards_in_buckets(self._program, shards, layouts, 8 * 2**20, "all_gather/gradient"):
                self._connect(stubs[place], whole)
                stubs[place].is_whole = True
                self._program.attachment(Facts).declare(stubs[place].tensor, Replicate())

    def _connect(self, stub: _Stub, value: tf.Tensor) -> None:
        stub.is_connected = True
        tape.reconnect(stub.tensor.op, stub.tensor.op.inputs[0], value)


def _after(operation: tf.Operation, tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns what `operation` returns that depends on `tensor`, one of its inputs."""
    if operation.type != "IdentityN":
        return list(operation.outputs)
    return [output for source, output in zip(operation.inputs, operation.outputs, strict=True) if tape.same(source, tensor)]


def second_order(program: RankProgram, dtype: tf.DType, upstream: tf.Tensor) -> list[tf.Tensor]:
    """The way back through the reduction, eager or traced: what a rank sends back to the sum is of its own summand, too.

    A function of the sum is computed on every rank, and its gradient counts once: in the sum of the ranks' gradients.
    """
    return [program.attachment(GradientWeight).without_weight(tf.cast(upstream, dtype))]
