"""The life of a sharded parameter in one step: gathered for forward, dropped, gathered for backward, its gradient scattered.

Why the second gather frees the first, and why there is one order: docs/design/parameter.md.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors, temporary
from tfdist.collectives import OfBranch, RankProgram, in_loop, nested_functions, rank_program
from tfdist.graphs import tape
from tfdist.placements.eager import EagerFacts
from tfdist.placements.facts import have_met
from tfdist.placements.kinds import Replicate
from tfdist.placements.redistribute import Redistribution
from tfdist.placements.repair import Repair
from tfdist.sharding.backward_order import Reduction, Regather, order_backward
from tfdist.sharding.compression import COMPRESSION
from tfdist.sharding.config import config_of
from tfdist.sharding.gradient_numbers import GradientNumbers
from tfdist.sharding.gradient_stubs import GradientStubs, Stub
from tfdist.sharding.gradient_weight import GradientWeight, without_weight
from tfdist.sharding.gradients_in_flight import GradientsInFlight
from tfdist.sharding.known_sums import KnownSums
from tfdist.sharding.parameter_group import ParameterGroup, ParameterGroups
from tfdist.sharding.recomputation import Recomputation
from tfdist.sharding.shard_messages import SumOfGradients, gather_parameters, gather_shards, messages_of, scope_name
from tfdist.sharding.units import Reader, Unit, compute_dtype_of, copy_of, gather_group


class UnshardSchedule(OfBranch):
    """One rank's gathers and reduce-scatters in one trace of `strategy.run`.

    At most `prefetch + 1` units are gathered at once, in each direction: a gather waits for the operations that read the
    unit `prefetch + 1` gathers before it. Without such a wait the executor would start every gather at once, since none
    depends on anything.

    Reads inside `while`, `cond`, `map` or a nested function are gathered once, in the graph of `strategy.run`, and captured.
    """

    def __init__(self, program: RankProgram):
        self._program = program
        self._recomputation = program.part(Recomputation)
        self._order = program.order
        self._units: list[Unit] = []
        self._live: list[Unit] = []
        self._emitting = self._takes_own = False
        self._config = config_of(tf.distribute.get_strategy())
        self._has_regathered = False
        self._regathering: set[tf.Operation] = set()  # operations of gathers of backward, which their gates alone hold back
        self._differentiated: set[int] = set()
        self._stubs = program.part(GradientStubs)

    # Forward

    def read(self, variable: Any, dtype: tf.DType) -> tf.Tensor:
        """Returns the full (local) value of `variable` in `dtype`, gathered with its group, on this rank's tapes."""
        if self._program.is_eager:
            return self._read_eagerly(variable, dtype)
        group = self._program.plan.shared(ParameterGroups, self._config.group_bytes).group_of(variable)
        compute_dtype = compute_dtype_of(variable, dtype)
        with self._program.outermost():
            for unit in reversed(self._live):
                if unit.compute_dtype == compute_dtype and self._is_recorded(unit, variable):
                    return unit.outputs[id(variable)]
            return self._gather(group, compute_dtype).outputs[id(variable)]

    def _read_eagerly(self, variable: Any, dtype: tf.DType) -> tf.Tensor:
        """Gathers at every read, and reduces the gradient as soon as the tape has it: there is no graph to rewrite."""
        program, config, layouts = self._program, self._config, [variable.layout]
        shard = variable.component(program.rank).value()  # on the tapes that watch the variable
        with tape.stop_recording():
            (full,) = gather_parameters(program, [shard], [variable], f"unshard/{variable.name}", config, dtype)

        program.part(EagerFacts).declare(full, Replicate(), is_of_weights=True)

        def reduced(upstream: tf.Tensor | tf.IndexedSlices) -> list[tf.Tensor]:
            grad = tf.convert_to_tensor(upstream)  # IndexedSlices: duplicates summed
            if self._takes_own or not tf.executing_eagerly():  # in a `tf.vectorized_map`: see `_on_gradient`
                return [tf.cast(grad, variable.dtype)]
            self._differentiated.add(id(variable))
            with tape.stop_recording():
                weight = program.part(GradientWeight).of_tape()
                label = f"reduce_scatter/{variable.name}"
                shards = SumOfGradients(program, config, [variable], layouts, label, weight).scattered([grad], variable.dtype)
                wholes = gather_shards(program, shards, layouts, f"all_gather/{variable.name}/gradient")
            own = without_weight(tf.cast(grad, variable.dtype), program.part(GradientWeight).began_with)
            program.part(KnownSums).note(wholes[0], shards[0], own)
            tape.record_gradient("ReduceScatter", wholes, [grad], functools.partial(self._second_order, grad.dtype))
            return wholes

        tape.record_gradient("Unshard", [full], [shard], reduced)
        return full

    def own_gradients(self) -> contextlib.AbstractContextManager[None]:
        """A block of an eager run in which tapes return this rank's summands, whole: a Jacobian, row by row."""
        return temporary.attributes(self, _takes_own=True)

    def invalidate(self) -> None:
        """Forgets what is gathered, because parameters are about to change: the next read gathers again."""
        self._live.clear()
        self._order.has_written = True
        if self._program.outer is not None:
            self._program.outer.part(UnshardSchedule).invalidate()
        tf.distribute.get_strategy().extended.weight_cache.forget_all(at_calls=not self._program.is_eager)

    def has_gradient(self, variable: Any) -> bool:
        """Whether a tape of this trace was asked for the gradient of `variable`."""
        return id(variable) in self._differentiated

    def _is_recorded(self, unit: Unit, variable: Any) -> bool:
        """Whether every tape that watches the variable knows the unit's output too; a tape opened since the gather does not."""
        if id(variable) not in unit.outputs:
            return False
        shard = variable.component(self._program.rank).value()  # on the tapes that watch the variable
        return tape.tapes_watching([unit.outputs[id(variable)]]) >= tape.tapes_watching([shard])

    def _gather(self, group: ParameterGroup, compute_dtype: tf.DType | None) -> Unit:
        config, variables = self._config, group.variables
        window = self._units[-config.prefetch - 1 :]
        if self._stubs.waiting or any(unit.backward_readers() for unit in window):
            self.flush()  # a read within backward (recomputation)
        shards = {id(v): v.component(self._program.rank).value() for v in variables}
        readers = [one.operations() for one in window] if len(window) > config.prefetch else []
        before, following = (*readers, [], [])[:2]
        gate: list[tf.Operation] = []
        if config.reshard_after_forward or not tape.tapes_watching(list(shards.values())):
            gate = [*before, *self._order.after_activations(before, following)]
            gate = [op for op in gate if not any(map(have_met, op.outputs))]  # of rows that a later message will bring
        if len(self._units) == 2 and config.prefetch:  # both gathered at once, and in any order: see `queue_after`
            first, second = (made.operations() for made in self._units)
            self._order.queue_after(first, second)
        unit = Unit(len(self._units), group, compute_dtype, shards)
        made_before = tape.operations_so_far()
        with self._order.ahead(before, following), self._own_emission(), tape.stop_recording():
            unit.outputs = self._all_gather(unit, variables, gate, f"unshard/{group.name}")
        self._recomputation.leave_alone(made := tape.operations_since(made_before))
        tape.same_for_all_rows(made)
        for variable in variables:
            gradient = functools.partial(self._on_gradient, unit, variable)
            tape.record_gradient("Unshard", [unit.outputs[id(variable)]], [shards[id(variable)]], gradient)
        self._units.append(unit)
        self._live.append(unit)
        if config.reshard_after_forward:
            self._live = self._live[-config.prefetch - 1 :]
        return unit

    def _all_gather(self, unit: Unit, variables: Sequence[Any], gate: Sequence[tf.Operation], label: str) -> dict[int, tf.Tensor]:
        """Gathers `variables` of `unit`, in as few messages as `messages_of` says, not before `gate` has run."""
        shards = {id(v): unit.shards[id(v)] for v in variables}
        with tf.control_dependencies(gate):
            shards = {key: tf.identity(shard) for key, shard in shards.items()} if gate else shards
        gathered = gather_group(self._program, variables, shards, unit.compute_dtype, label, self._config)
        return {id(variable): full for variable, full in gathered}

    def is_of_sums(self, gradient: tf.Tensor) -> bool:
        """Whether `gradient` is computed from what a tape has returned: it is then whole, and the same on all ranks."""
        below = self._stubs.below(gradient)
        self.flush([stub.tensor for stub in below])
        with self._own_emission():
            self._stubs.fill(below)
        outer = self._program.outer
        return bool(below) or outer is not None and outer.part(UnshardSchedule).is_of_sums(gradient)

    def before_known(self, tensor: tf.Tensor) -> None:
        """Fills what a loss or a log of Keras's trainer is computed from: it is of the sums, which all ranks have."""
        if self._program.part(GradientWeight).is_of_trainer and self._stubs.below(tensor):
            self.is_of_sums(tensor)

    def before_branch(self, read: Sequence[tf.Tensor]) -> None:
        self._let_read(read)

    def _let_read(self, tensors: Sequence[tf.Tensor]) -> None:
        """Reduces and gathers what `tensors`, which a branch or the caller reads, are computed from, and what was read before."""
        if any(stub.tensor.consumers() for stub in self._stubs.waiting):
            self.flush()
        for tensor in tensors:
            if self._stubs.below(tensor):
                self.is_of_sums(tensor)

    def close(self, outputs: Any) -> None:
        self._stubs.write_summands()
        self._let_read([x for x in tf.nest.flatten(outputs) if tf.is_symbolic_tensor(x)])
        self.flush()
        self._stubs.give_values()
        if self._units and self._config.prefetch and self._order.is_on_chain:
            units = [([unit.gathered], [op for op in unit.operations() if not tape.is_backward(op)]) for unit in self._units]
            self._order.queue_units_in_order(units)

    # Backward

    def _on_gradient(self, unit: Unit, variable: Any, upstream: tf.Tensor | tf.IndexedSlices) -> list[tf.Tensor]:
        """The tape's way back through a gather: notes the full gradient, returns a stub for the sum.

        In a branch that reads what was gathered outside it is the branch that reduces its gradient. In a loop and in a
        `tf.vectorized_map`, where nothing can be sent, it is this rank's own, whole: of single examples and rows that is wanted.
        """
        program = rank_program()
        here = program.here() if program is not None else None
        if here is not None and here is not self._program:
            return here.part(UnshardSchedule)._on_gradient(unit, variable, upstream)
        full = tf.convert_to_tensor(upstream)  # IndexedSlices: duplicates summed
        full.set_shape(variable.layout.local_shape)
        if tape.in_vectorized_map() or in_loop(self._program.graph):
            return [tf.cast(full, variable.dtype)]
        if full.graph is not self._program.graph:
            raise nested_functions.refusal(variable)
        if self._program.part(GradientWeight).is_nested:
            raise errors.not_implemented(
                f"The function of a `tf.custom_gradient` (or `tf.recompute_grad`) takes the gradient of {variable.name!r}, of "
                "which each device has a part, with a tape of its own.",
                fix="To compute a layer again in backward use `tfdist.layers.recompute(model, ...)` or `keras.remat`; else write "
                "the gradient down, or use `zero_stage=2`.",
            )
        self._differentiated.add(id(variable))
        with tape.stop_recording():
            stub = self._stubs.make(variable, full, unit).tensor
        tape.record_gradient("ReduceScatter", [stub], [full], functools.partial(self._second_order, full.dtype))
        return [stub]

    def _second_order(self, dtype: tf.DType, upstream: tf.Tensor) -> list[tf.Tensor]:
        """The way back through the reduction, eager or traced: what a rank sends back to the sum is of its own summand, too.

        A function of the sum is computed on every rank, and its gradient counts once: in the sum of the ranks' gradients. It is
        no mean of the rank's own, and counts no weight.
        """
        self.is_of_sums(upstream)  # it may be a gradient itself, which must be there before what follows from it
        weight = self._program.part(GradientWeight)
        if weight.is_of_trainer and self._program.is_eager:  # what the ranks' readers have sent is not known there
            return [tf.cast(self._program.part(EagerFacts).of_all_readers(upstream), dtype)]
        if weight.is_of_trainer:
            upstream = self._program.part(Redistribution).of_all_readers(upstream)
        return [without_weight(tf.cast(upstream, dtype), weight.began_with)]

    def settle(self) -> None:
        """Emits what stands before a collective, but in a backward in which each begins when its input is there."""
        if not (tape.in_backward() and self._order.sends_activations_first):
            self.flush()

    def flush(self, gradients: Sequence[Any] = ()) -> None:
        """Emits what backward has asked for so far.

        Args:
            gradients: tensors that are about to be used; a reduced gradient that is neither among them nor read by an
                operation may not be wanted and is not reduced yet. Within the backward pass, where a collective of a layer
                has its place, those of layers that are not frozen are taken to be wanted: kept until the end, all full
                gradients would exist at once.
        """
        if self._emitting:
            return
        if not self._program.is_eager:  # what they send wants what is emitted here to stand before it
            self._program.part(Repair).look()
        self._program.part(GradientNumbers).settle()
        if self._units or self._stubs.waiting:
            self._reduce_and_regather(gradients)
        with self._own_emission():
            self._stubs.fill_what_is_read()

    def _reduce_and_regather(self, gradients: Sequence[Any]) -> None:
        wanted = {id(tensor) for tensor in gradients}
        if tape.in_backward():
            wanted.update(id(stub.tensor) for stub in self._stubs.waiting if not stub.variable.is_frozen)
        ready = [stub for stub in self._stubs.waiting if id(stub.tensor) in wanted or stub.tensor.consumers()]
        self._recomputation.connect([stub.full for stub in ready] or None)
        uses = self._backward_uses()
        if not ready and not uses:
            return
        operations = self._order.operations([stub.full for stub in ready])
        numbers = {op.name: number for number, op in enumerate(operations)}
        by_unit: dict[int, list[Stub]] = {}
        for stub in ready:
            by_unit.setdefault(stub.unit.index, []).append(stub)
        reductions = [Reduction(i, max(numbers[p.full.op.name] for p in group)) for i, group in by_unit.items()]
        regathers = self._regathers(uses, numbers)
        start = self._start_of_backward(uses, numbers)
        with self._own_emission(), self._program.outermost(), tape.stop_recording():
            previous: Sequence[tf.Tensor | tf.Operation] = []
            steps = order_backward(regathers, reductions, self._config.prefetch)
            reduced = [step.action.unit for step in steps if isinstance(step.action, Reduction)]
            flight = self._in_flight([by_unit[index] for index in reduced], uses, numbers)
            has_own_turns = self._program.has_own_turns(self._program.group_ranks("shard"))
            if start and regathers and self._order.is_limited:
                # What is gathered again for those that follow would else wait for them. They wait for sums of a loss, too.
                first = min(regathers, key=lambda regather: min(regather.uses))
                readers = [reader.operation for reader in uses[first.unit]]
                over = [start[-1], *self._order.last_on_chain(readers)]
                self._order.run_when_done(readers, over, "backward")
            for step in steps:
                if isinstance(step.action, Regather):
                    gate = start if step.gate is None else [operations[number] for number in step.gate]
                    with self._order.among_activations():
                        self._regather(self._units[step.action.unit], uses[step.action.unit], gate)
                else:
                    with self._order.among_activations():
                        sent, encoded = self._reduce_scatter(by_unit[step.action.unit], previous)
                    flight.hold_back(flight.note_emitted(encoded), sent[-1].op)
                    previous = [] if has_own_turns else encoded or sent

    def _in_flight(
        self, messages: Sequence[Sequence[Stub]], uses: dict[int, list[Reader]], numbers: dict[str, int]
    ) -> GradientsInFlight:
        """Returns the full gradients, large ones made when the unit's gathered parameters have been read and freed."""
        fulls = [[stub.full for stub in message] for message in messages]
        flight = GradientsInFlight(fulls, numbers, self._program)
        if self._order.is_on_chain:
            operations = [one for one in self._order.operations([]) if one not in self._regathering]
            self._order.limit_lead(fulls, operations, collectives_each=2)  # its reduction, and a gather
        for number, message in enumerate(messages):
            flight.compute_after(number, list(dict.fromkeys(one.operation for one in uses.get(message[0].unit.index, []))))
        return flight

    def _backward_uses(self) -> dict[int, list[Reader]]:
        """Returns, per unit index, the backward readers of its forward copy that must be moved to a second one."""
        if not self._config.reshard_after_forward:
            return {}
        idle = self._recomputation.idle
        uses = {unit.index: unit.backward_readers(idle) for unit in self._units if not unit.is_kept}
        return {index: readers for index, readers in uses.items() if readers}

    def _regathers(self, uses: dict[int, list[Reader]], numbers: dict[str, int]) -> list[Regather]:
        places = {index: {numbers[reader.operation.name] for reader in readers} for index, readers in uses.items()}
        if places and not self._has_regathered:
            self._has_regathered = True
            first = min(places, key=lambda index: min(places[index]))
            # Gathered last and needed first: the forward copy is still there and serves backward.
            self._units[first].is_kept = first == len(self._units) - 1
        return [Regather(index, tuple(sorted(found)), self._units[index].is_kept) for index, found in places.items()]

    def _start_of_backward(self, uses: dict[int, list[Reader]], numbers: dict[str, int]) -> list[tf.Operation]:
        """Returns the operations whose results the first backward reader of a parameter needs besides the parameter."""
        readers = [reader for found in uses.values() for reader in found]
        if not readers:
            return []
        first = min(readers, key=lambda reader: numbers[reader.operation.name])
        others = [tensor.op for tensor in first.operation.inputs if not tape.same(tensor, first.tensor)]
        others += first.operation.control_inputs  # of one that is made again, not what has just held it back on the host
        return [op for op in others if op.name in numbers and numbers[op.name] < numbers[first.operation.name]]

    def _regather(self, unit: Unit, readers: Sequence[Reader], gate: Sequence[tf.Operation]) -> None:
        read = {reader.variable for reader in readers}
        variables = [v for v in unit.group.variables if id(v) in read]
        before = tape.operations_so_far()
        again = self._all_gather(unit, variables, gate, f"unshard/{unit.group.name}/backward")
        self._regathering.update(tape.operations_since(before))
        if self._order.is_on_chain:
            over = list(again.values())[-1].op
            self._order.run_when_done([reader.operation for reader in readers], [over], "gathers of backward")
        copies = {unit.outputs[key].name: full for key, full in again.items()}
        for reader in readers:
            tape.reconnect(reader.operation, reader.tensor, copy_of(reader.tensor, copies))

    def _reduce_scatter(
        self, stubs: Sequence[Stub], previous: Sequence[tf.Tensor | tf.Operation]
    ) -> tuple[list[tf.Tensor], list[tf.Operation]]:
        """Reduces a unit's gradients, in as few messages as `messages_of` says; packed only after the `previous` ones.

        Packing earlier would hold a second copy of the gradients while they wait for their turn. Returns what the rank gets of
        each message; and what ends their encoding, if they are encoded.
        """
        label = f"reduce_scatter/{stubs[0].unit.group.name}"
        weight = self._program.part(GradientWeight).of_tape()
        sent: list[tf.Tensor] = []
        encoded: list[tf.Operation] = []
        for members in messages_of(stubs, [stub.variable for stub in stubs], lambda x: (x.full.dtype, x.tensor.dtype)):
            variables, layouts = [stub.variable for stub in members], [stub.variable.layout for stub in members]
            message = SumOfGradients(self._program, self._config, variables, layouts, label, weight)
            with tf.name_scope(scope_name(label)), tf.control_dependencies(previous):
                shards = message.scattered([stub.full for stub in members], members[0].tensor.dtype)
            for stub, shard in zip(members, shards, strict=True):
                self._stubs.note_reduced(stub, shard)
            sent.append(shards[0])
            encoded += COMPRESSION.now.encoded(self._program)
        return sent, encoded

    def _own_emission(self) -> contextlib.AbstractContextManager[None]:
        """A block whose collectives are this schedule's own: they do not flush it."""
        return temporary.attributes(self, _emitting=True)
