"""Numbers that gradients meet between the tape and the optimizer: those of the whole batch.

    g * loss,  g / tokens                           the ranks agree on the loss, on the number of tokens
    tf.clip_by_value(g, -0.01 * loss, 0.01 * loss)  the same
    tf.where(loss < 1.0, g, 0.0 * g)                the same

A gradient is one device's when it has been reduced; a number that a rank has computed of its own rows is not. What reads a
gradient is looked at in the order in which it is traced.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import OfBranch, RankProgram
from tfdist.graphs import tape
from tfdist.graphs.walks import reached
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import How, Partial, Replicate, Shard, Unknown
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.redistribute import Redistribution
from tfdist.placements.repair import Repair
from tfdist.placements.table import Linear, row_of


class GradientNumbers(OfBranch):
    """The numbers that gradients meet in the graph of one rank's program. A part of the rank's state, and of a branch's.

    Attributes:
        is_own: whether gradients are read for the optimizer, or to agree.
        is_agreeing: whether the ranks are about to agree on some.
    """

    def __init__(self, program: RankProgram):
        self._program = program
        self._gradients: set[str] = set()  # by name
        self._computed: set[str] = set()  # these, and what is computed of them
        self._met: list[tuple[tf.Operation, int]] = []  # which operations read numbers beside gradients, and where
        self._num_searched = 0
        self._of_tapes: list[list[int]] = []  # from which operation to which a tape has made them
        self.is_own = False
        self.is_agreeing = False

    def note(self, gradient: tf.Tensor) -> None:
        """Notes that `gradient` is what a tape has returned."""
        if not self._computed:
            self._num_searched = len(self._program.graph.get_operations())
        self._gradients.add(gradient.name)
        self._computed.add(gradient.name)

    def is_of_gradients(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is what a tape has returned, or computed of that."""
        self.settle()
        return tensor.name in self._computed

    def close(self, outputs: Any) -> None:
        self.settle()

    def settle(self) -> None:
        """Lets what has read gradients so far read the numbers beside them of the whole batch."""
        self._follow()
        if self.is_own or not self._met:
            return
        met = [one for one in self._met if self._must_be_whole(*one)]
        self._met = [one for one in self._met if one not in met and _adds(one[0])]  # what reads the sum may not be there yet
        if not met:
            return
        with self.own_use(is_agreeing=True):
            wholes = self._program.part(Repair).wholes([op.inputs[place] for op, place in met], "gradient")
            for (op, place), whole in zip(met, wholes, strict=True):
                if whole is not None and whole is not op.inputs[place]:
                    self._program.part(Redistribution).reads(op, place, whole)

    def _follow(self) -> None:
        """Finds what is computed of gradients, a branch of what it has captured, and what these meet."""
        mesh, outer = self._program.mesh, self._program.outer
        if self.is_own or mesh.size("data") == 1 or mesh.splits_layers:
            return
        if outer is not None:
            outer.part(GradientNumbers)._follow()
            for outside, inside in self._program.graph.captures:
                made_by = outer.that_made(outside) if tf.is_symbolic_tensor(outside) else None
                if made_by is not None and outside.name in made_by.part(GradientNumbers)._computed:
                    self._computed.add(inside.name)
        if not self._computed:
            return
        operations = self._program.graph.get_operations()
        start, self._num_searched = self._num_searched, len(operations)
        for number, op in enumerate(operations[start:], start):
            if op.type.startswith("Collective") or not any(x.name in self._computed for x in op.inputs):
                continue
            self._computed.update(x.name for x in op.outputs)
            is_of_tape = tape.is_backward(op) or any(begin <= number < end for begin, end in self._of_tapes)
            if not is_of_tape and not tape.writes(op) and not self._program.has_sent_in(op):
                self._met += [(op, place) for place, x in enumerate(op.inputs) if x.name not in self._computed]

    def _must_be_whole(self, op: tf.Operation, place: int) -> bool:
        facts, number = self._program.part(Facts), op.inputs[place]
        if number.dtype == tf.resource or tape.is_backward(number.op) or isinstance(facts.of(number), Replicate | Shard):
            return False
        if self._is_weight(number):  # with which a gradient is reduced
            return False
        if facts.of(number) == Partial(How.REPLICAS) and not self._program.part(RankRows).are_means:
            return False  # by which a loop divides what it will sum
        beside = [other for other, x in enumerate(op.inputs) if x.name in self._computed]
        if not _adds(op) or any(self._is_gradient(op.inputs[other]) for other in beside):
            return True
        # What is added may be a loss, with a penalty of gradients.
        with facts.assuming() as assume:  # what reads a gradient otherwise is made to read a sum
            for other in beside:
                assume(op, other, Replicate())
            is_unknown = any(isinstance(facts.of(x), Unknown) for x in op.outputs)
        return is_unknown or self._meets_a_gradient(op)

    def _meets_a_gradient(self, op: tf.Operation) -> bool:
        """Whether a gradient meets what is computed of `op`, as far as the graph has come."""
        found = self._program.part(Redistribution).found
        waiting, seen = list(op.outputs), {x.name for x in op.outputs}
        for x in (x for x in waiting if found(x) is None):  # what ranks have agreed on is read in its place
            for reader in (one for one in x.consumers() if not tape.is_backward(one) and not tape.writes(one)):
                others = [y for y in reader.inputs if y.name in self._computed and y.name not in seen]
                if any(map(self._is_gradient, others)):
                    return True
                waiting.extend(y for y in reader.outputs if y.name not in seen)
                seen.update(y.name for y in reader.outputs)
        return False

    def _is_gradient(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor`, computed of gradients, is a gradient still, to which something may have been added."""
        facts = self._program.part(Facts)
        terms = reached([tensor], lambda x: [y for y in x.op.inputs if y.name in self._computed] if _adds(x.op) else [])
        return any(x.name in self._gradients or isinstance(facts.of(x), Partial) for x in terms)

    def _is_weight(self, number: tf.Tensor) -> bool:
        """Whether `number` is the rank's weight, or says whether it has one."""
        while number.op.type in ("Cast", "Greater", "Identity"):
            number = number.op.inputs[0]
        return self._program.part(RankRows).is_weight(number)

    @contextlib.contextmanager
    def going_back(self) -> Iterator[None]:
        """A block in which a tape goes back."""
        made = [len(self._program.graph.get_operations()), sys.maxsize]
        self._of_tapes.append(made)
        yield
        made[1] = len(self._program.graph.get_operations())

    @contextlib.contextmanager
    def own_use(self, *, is_agreeing: bool = False) -> Iterator[None]:
        """A block that reads gradients for the optimizer, or for ranks to agree on what these have met."""
        if not is_agreeing:
            self.settle()
        try:
            with temporary.attributes(self, is_own=True, is_agreeing=is_agreeing):
                yield
        finally:
            self._num_searched = len(self._program.graph.get_operations())


def _adds(op: tf.Operation) -> bool:
    return row_of(op.type).linear is Linear.TOGETHER
