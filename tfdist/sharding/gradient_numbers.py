"""Numbers that gradients meet between the tape and the optimizer: those of the whole batch.

    g * loss,  g / tokens                           the ranks agree on the loss, on the number of tokens
    tf.clip_by_value(g, -0.01 * loss, 0.01 * loss)  the same
    tf.where(loss < 1.0, g, 0.0 * g)                the same

A gradient is one device's when it has been reduced; a number that a rank has computed of its own rows is not. What reads a
gradient is looked at in the order in which it is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import RankProgram
from tfdist.graphs import tape
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import How, Partial, Replicate, Shard, Unknown
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.redistribute import Redistribution
from tfdist.placements.repair import Repair


class GradientNumbers:
    """The numbers that gradients meet in the graph of one rank's program; an attachment of the program, and of a branch's."""

    IS_OF_BRANCH = True

    def __init__(self, program: RankProgram):
        self._program = program
        self._computed: set[str] = set()  # gradients, and what is computed of them, by name
        self._met: list[tuple[tf.Operation, int]] = []  # what reads gradients, and the places of numbers beside them
        self._num_searched = 0
        self._is_own = False
        program.before_collective.append(self.settle)
        program.at_close.append(lambda _: self.settle())

    def note(self, gradient: tf.Tensor) -> None:
        """Notes that `gradient` is what a tape has returned."""
        if not self._computed:
            self._num_searched = len(self._program.graph.get_operations())
        self._computed.add(gradient.name)

    def settle(self) -> None:
        """Lets what has read gradients so far read the numbers beside them of the whole batch."""
        if self._is_own or not self._computed or self._program.mesh.size("data") == 1:
            return
        operations = self._program.graph.get_operations()
        start, self._num_searched = self._num_searched, len(operations)
        for op in operations[start:]:
            if op.type.startswith("Collective") or not any(x.name in self._computed for x in op.inputs):
                continue
            self._computed.update(x.name for x in op.outputs)
            if not tape.is_backward(op) and not tape.writes(op):
                self._met += [(op, place) for place, x in enumerate(op.inputs) if x.name not in self._computed]
        with self._own():
            self._met = [(op, place) for op, place in self._met if not self._is_settled(op, place)]

    def _is_settled(self, op: tf.Operation, place: int) -> bool:
        """Lets `op` read the number at `place` of the whole batch, if it must; returns False where that is not known yet."""
        facts, repair, number = self._program.attachment(Facts), self._program.attachment(Repair), op.inputs[place]
        if number.dtype == tf.resource or tape.is_backward(number.op) or isinstance(facts.of(number), Replicate | Shard):
            return True
        if self._program.attachment(RankRows).are_means:
            if any(isinstance(facts.of(x), Unknown) for x in op.inputs if x.name in self._computed):
                return False  # something that reads a gradient, and will be made to read a sum
            if not any(isinstance(facts.of(x), Unknown) for x in op.outputs):
                return True  # a part of a rank's own mean, as the gradient is
        elif facts.of(number) == Partial(How.REPLICAS):  # by which a loop divides what it will sum
            return True
        whole = repair.whole(number, "gradient")
        if whole is not None and whole is not number:
            self._program.attachment(Redistribution).reads(op, place, whole)
        return True

    @contextlib.contextmanager
    def own_use(self) -> Iterator[None]:
        """A block that reads gradients for the optimizer."""
        self.settle()
        with self._own():
            yield

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        try:
            with temporary.attributes(self, _is_own=True):
                yield
        finally:
            self._num_searched = len(self._program.graph.get_operations())
