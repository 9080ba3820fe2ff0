"""Gradients of whole parameters while a step is traced (stages 0 to 2), and who reads their sums.

A tape returns a rank's own summand. An optimizer sums it over the ranks, and as long as the code between does something linear
(a scale, a mask, a centred gradient), it may do so with summands. Operations that are not linear (clipping, norms, noise, a
penalty of the weight that is added) are one device's only of the sum: the operations that read a gradient so are made to read the
sum, whole and the same on all ranks, which is reduced for them. What follows from that is whole, too, and is not summed again.

    grads = tape.gradient(loss, weights)                    summands
    grads = [g / 4 for g in grads]                          summands still
    grads, norm = tf.clip_by_global_norm(grads, 1.0)        reads the sums: reduced here, once
    optimizer.apply(grads, weights)                         is given what is whole

A gradient that is only returned from the function of the rank is its summand: the caller sums. So is one that the user's code
gives a collective, which sums it, and what is added to a variable that is no parameter, in a custom training loop. A parameter,
and in a step of Keras's trainer every variable, gets the sum; so does a slot of an optimizer, of which a rank stores its part.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import OfBranch, RankProgram, group_ops
from tfdist.graphs import tape
from tfdist.graphs.walks import reached
from tfdist.placements.eager import EagerFacts
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import Partial, Placement
from tfdist.placements.redistribute import Redistribution
from tfdist.placements.repair import Repair
from tfdist.placements.totals import wide
from tfdist.sharding import gradient_graph
from tfdist.sharding.carried_gradients import CarriedGradients
from tfdist.sharding.gradient_numbers import GradientNumbers
from tfdist.sharding.gradient_state import GradientState
from tfdist.sharding.gradient_stubs import GradientStubs
from tfdist.sharding.gradient_weight import GradientWeight, weighted


@dataclasses.dataclass(eq=False)
class _Summand:
    tensor: tf.Tensor
    variable: Any  # None: of what a loop or a branch has computed of gradients, and of a tensor that is computed of weights
    is_weighted: bool  # that the loss which was differentiated counted the rank's weight
    whole: tf.Tensor | None = None  # the sum, once it is read


class TapeGradients(OfBranch):
    """The gradients of whole parameters of one rank's program in one trace. A part of the rank's state, and of a branch's."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._summands: dict[str, _Summand] = {}
        self._linear = gradient_graph.Derived(
            lambda x: frozenset([self._summands[x.name]]) if x.name in self._summands else None, program=program
        )
        self._images: dict[str, tf.Tensor] = {}  # by the name of what is linear in summands: the same of the sums
        self._wholes: set[str] = set()
        self._slots: set[str] = set()  # whole values of an optimizer's slots
        self._own: set[str] = set()  # operations that are not the user's, by name
        self._is_own = False
        self._whole_sums: Callable[..., Sequence[tf.Tensor]] | None = None
        self._is_asked = False
        self._num_searched = 0  # operations of the graph that were looked at for gradients that come out of them
        self._numbers = program.part(GradientNumbers)
        self._stubs = program.part(GradientStubs)
        self._sources = gradient_graph.Sources(lambda x: x.graph is program.graph and self._is_whole(x))

    def note(
        self, grads: Sequence[tf.Tensor], variables: Sequence[Any], whole_sums: Callable[..., Sequence[tf.Tensor]] | None = None
    ) -> None:
        """Notes what a tape has returned for `variables`, None for tensors that are computed of weights alone.

        `whole_sums(grads, variables)` sums those of variables over the ranks.
        """
        self.be_asked()
        if self._is_written():
            self.settle()  # not in one message with these
        self._whole_sums = whole_sums or self._whole_sums
        is_in_loss = self._program.part(GradientWeight).is_in_loss
        for grad, variable in zip(grads, variables, strict=True):
            self._numbers.note(grad)
            self._own.update(operation.name for operation in grad.consumers())  # the backward pass itself goes on from it
            if variable is not None or grad.name not in self._summands:
                self._add(_Summand(grad, variable, is_in_loss and variable is not None))
            if variable is not None:
                self._note_gets_sum(variable)
            if self._program.outer is not None:
                self._program.part(CarriedGradients).note(grad)

    def _know_made_by_hand(self, grads: Sequence[Any]) -> None:
        """Lets what `grads`, for an optimizer, are made of by hand be of the whole batch: of gradients of rows, in a step of
        Keras's trainer, by the chain rule."""
        is_of_trainer = self._program.part(GradientWeight).is_of_trainer and not self._numbers.is_own
        if self._program.is_eager or not is_of_trainer or self._program.mesh.splits_layers:
            return
        self._find_carried()
        for x in tf.nest.flatten(list(grads), expand_composites=True):
            is_here = tf.is_symbolic_tensor(x) and x.dtype.is_floating and self._program.exists_here(x)
            if not is_here or self._linear.of(x) is not None or self._stubs.below(x):
                continue
            if not tape.is_backward(x.op) and not self._numbers.is_of_gradients(x):
                self._program.part(Repair).known(x, "gradient")

    def note_in_loop(self, grad: tf.Tensor, variable: Any) -> None:
        """Notes the gradient of `variable` that a tape has returned in a loop, where nothing can be summed: a rank's summand."""
        self.be_asked()
        self._note_gets_sum(variable)
        self._program.part(CarriedGradients).note(grad)

    def _note_gets_sum(self, variable: Any) -> None:
        stored = variable if isinstance(variable, tf.Variable) else variable.value
        self._stubs.note_gets_sum(stored.values[self._program.local_index].handle)

    def be_asked(self) -> None:
        """Lets what comes out of loops and branches be looked at, in this program and in those around it."""
        if self._program.outer is not None:
            self._program.outer.part(TapeGradients).be_asked()
        self._is_asked = True

    def before_branch(self, read: Sequence[tf.Tensor]) -> None:
        # A branch may wait for a variable that was written with what has been read so far, and send something.
        self.settle()
        self._let_branch_read(read)

    def close(self, outputs: Any) -> None:
        self.settle()

    def _add(self, summand: _Summand) -> None:
        self._summands[summand.tensor.name] = summand
        self._linear.forget(summand.tensor)

    def _find_carried(self) -> None:
        carried = self._program.part(CarriedGradients)
        if self._is_asked and carried.are_any:
            operations = self._program.graph.get_operations()
            for operation in operations[self._num_searched :]:
                for output in carried.out_of(operation):
                    if output.name not in self._summands:
                        self._add(_Summand(output, None, is_weighted=False))
            self._num_searched = len(operations)

    def note_whole(self, grad: tf.Tensor) -> None:
        """Notes that `grad` is a sum, whole and the same on all ranks."""
        self._wholes.add(grad.name)
        self._sources.forget(grad)

    def note_slot(self, whole: tf.Tensor) -> None:
        """Notes that `whole` is the whole value of an optimizer's slot, the same on all ranks."""
        self._slots.add(whole.name)
        self._sources.forget(whole)

    def _is_whole(self, tensor: tf.Tensor) -> bool:
        return tensor.name in self._wholes or tensor.name in self._slots

    def is_gradient(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is a sum, or linear in summands."""
        return bool(self._summands or self._wholes) and (tensor.name in self._wholes or self._linear.of(tensor) is not None)

    def is_of_sums(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor`, made where all ranks run, is computed of sums, and is neither a summand nor linear in summands."""
        if not self._program.exists_here(tensor):
            return False
        below = self._stubs.needs_sums(tensor) and any(stub.state is GradientState.WHOLE for stub in self._stubs.below(tensor))
        of_wholes = bool(self._wholes) and self._linear.of(tensor) is None and bool(self._sources.of(tensor))
        return below or of_wholes

    def placement_of(self, grad: tf.Tensor) -> Placement | None:
        """Returns the placement of `grad`, in a step of Keras's trainer; None: it is not looked for."""
        is_of_trainer = self._program.part(GradientWeight).is_of_trainer
        made_by = self._program.that_made(grad) if is_of_trainer and tf.is_symbolic_tensor(grad) else None
        return None if made_by is None else made_by.part(Facts).of(grad)

    def whole_of(self, grad: tf.Tensor) -> tf.Tensor | None:
        """Returns the sum, whole, where `grad` is computed from sums, or linear in gradients with known sums; else None."""
        if not tf.is_symbolic_tensor(grad):
            return None
        self._find_carried()
        made_by = self._program.that_made(grad)
        if made_by not in (None, self._program):
            return made_by.part(TapeGradients).whole_of(grad)
        below = self._linear.of(grad) if made_by is not None and (self._summands or self._wholes) else None
        if below:
            return self._image(grad) if all(summand.whole is not None for summand in below) else None
        outer = self._program.outer
        is_whole = self._let_branch_read([grad]) if made_by is None else bool(self._sources.of(grad))
        while outer is not None and not is_whole:
            is_whole, outer = outer.part(TapeGradients)._let_branch_read([grad]), outer.outer
        return grad if is_whole and not isinstance(self.placement_of(grad), Partial) else None

    def summand(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns `tensor`, linear in summands, for the user's code to sum itself."""
        if not self._is_asked:
            return None
        self._find_carried()
        if not self._linear.of(tensor):
            return None
        with self._marked(), self._program.outermost():
            return tf.identity(tensor)

    def sum_now(self, grads: Sequence[tf.Tensor]) -> None:
        """Sums what `grads` are linear in, so that `whole_of` finds the sums."""
        with self._marked(), self._program.outermost(), tape.stop_recording():
            self._sum_missing(dict.fromkeys(summand for grad in grads for summand in self._linear.of(grad) or ()))

    def _let_branch_read(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Whether some of `tensors`, read in a branch, are computed from gradients: of which it will read the sums."""
        self._find_carried()
        if not (self._summands or self._wholes):
            return False
        sources = gradient_graph.Sources(lambda x: x.graph is self._program.graph and x.name in self._summands)
        found = {self._summands[name] for read in tensors for name in sources.of(read) or ()}
        with self._marked(), self._program.outermost(), tape.stop_recording():
            self._sum_missing(found)
        return bool(found) or any(self._sources.of(read) for read in tensors)

    @contextlib.contextmanager
    def own_use(self, grads: Sequence[Any] = ()) -> Iterator[None]:
        """A block that reads gradients as summands, whatever it does with them: an optimizer's, which was given `grads`."""
        self._know_made_by_hand(grads)
        self.settle()
        if self._program.is_eager:
            with self._program.part(EagerFacts).own_use():
                yield
        else:
            here = self._program.here() or self._program
            with self._numbers.own_use(), self._marked(), here.part(Repair).not_seen():
                yield

    @contextlib.contextmanager
    def _marked(self) -> Iterator[None]:
        if self._is_own or not self._summands:
            yield
            return
        start, self._is_own = len(self._program.graph.get_operations()), True
        try:
            yield
        finally:
            self._is_own = False
            self._own.update(operation.name for operation in self._program.graph.get_operations()[start:])

    def settle(self) -> None:
        """Sums the gradients that the user's code has read so far by something that is not linear, and lets it read the sums."""
        if self._numbers.is_agreeing:
            return  # what gradients meet is still that of the rank
        if not self._is_own:
            self._numbers.settle()
        self._find_carried()
        reads = [] if self._is_own else self._reads()
        if not reads:
            return
        below = dict.fromkeys(summand for _, tensor in reads for summand in self._linear.of(tensor) or ())
        with self._marked(), self._program.outermost(), tape.stop_recording():
            self._sum_missing(below)
            images = [self._image(tensor) for _, tensor in reads]  # first: a product of which one factor is read is linear
            for (operation, tensor), image in zip(reads, images, strict=True):
                tape.reconnect(operation, tensor, image)
                self._program.part(Redistribution).stands_for(image, tensor)

    def _sum_missing(self, summands: Iterable[_Summand]) -> None:
        wanted = set(summands)
        missing = [s for s in self._summands.values() if s in wanted and s.whole is None]  # in one order on all ranks
        for is_weighted in (False, True):
            with self._program.part(GradientWeight).entered_with_the_loss(is_weighted):
                self._sum([summand for summand in missing if summand.is_weighted is is_weighted])

    def _sum(self, summands: Sequence[_Summand]) -> None:
        carried = [summand for summand in summands if summand.variable is None]
        others = [summand for summand in summands if summand.variable is not None]
        grads, variables = [summand.tensor for summand in others], [summand.variable for summand in others]
        wholes = list(self._whole_sums(grads, variables)) if others else []
        for summand, whole in zip([*others, *carried], [*wholes, *map(self._sum_of_carried, carried)], strict=True):
            summand.whole = self._images[summand.tensor.name] = tf.identity(whole)
            self._wholes.add(summand.whole.name)

    def _sum_of_carried(self, summand: _Summand) -> tf.Tensor:
        program, grad = self._program, summand.tensor
        mine = weighted(wide(grad), program.part(GradientWeight).of_wholes())
        total = group_ops.all_reduce(program, mine, program.group_ranks("data"), "sum", "all_reduce/carried_gradient")
        return tf.cast(total, grad.dtype)

    def _reads(self) -> list[tuple[tf.Operation, tf.Tensor]]:
        """Returns the operations that read, as one device would read a sum, what is linear in summands; and that."""
        reads = []
        waiting = [summand.tensor for summand in self._summands.values()]
        seen = set(self._summands)
        while waiting:
            tensor = waiting.pop()
            for operation in tensor.consumers():
                if operation.name in self._own:
                    continue
                found = [*map(self._linear.of, operation.inputs)]
                is_linear = not tape.is_backward(operation) and self._linear.of_result(operation, found) is not None
                if not (is_linear or operation.type == "IdentityN" or self._stubs.gets_summand(operation, tensor)):
                    reads.append((operation, tensor))  # in backward by the gradient of something that reads it
                    continue
                after = [x for x in operation.outputs if x.name not in seen and self._linear.of(x) is not None]
                waiting += after
                seen.update(output.name for output in after)
        return reads

    def _is_written(self) -> bool:
        """Whether a variable is assigned what is to read the sum of a gradient: what follows may have read that variable."""
        reads = [] if self._is_own else [op for op, _ in self._reads()]
        outputs = reached([x for op in reads for x in op.outputs], lambda x: [y for op in x.consumers() for y in op.outputs])
        return any(map(tape.writes, [*reads, *(op for x in outputs for op in x.consumers())]))

    def _image(self, tensor: tf.Tensor) -> tf.Tensor:
        with self._marked(), self._program.outermost(), tape.stop_recording():
            return self._linear.image(tensor, self._images)
