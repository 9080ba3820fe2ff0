"""Numbers that gradients meet between the tape and the optimizer: those of the whole batch.

    g * loss,  g / tokens                           the ranks agree on the loss, on the number of tokens
    tf.clip_by_value(g, -0.01 * loss, 0.01 * loss)  the same
    tf.where(loss < 1.0, g, 0.0 * g)                the same

A gradient is one device's when it has been reduced; a number that a rank has computed of its own rows is not. What reads a gradient
is looked at in the order in which it is traced, each operation once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import RankProgram
from tfdist.graphs import tape
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import Partial, Unknown
from tfdist.placements.redistribute import Redistribution
from tfdist.placements.repair import Repair


class GradientNumbers:
    """The numbers that gradients meet in the graph of one rank's program; an attachment of the program, and of a branch's."""

    IS_OF_BRANCH = True

    def __init__(self, program: RankProgram):
        self._program = program
        self._computed: set[str] = set()  # gradients, and what is computed of them, by name
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
        met: list[tuple[tf.Operation, int]] = []
        for op in operations[start:]:
            if op.type.startswith("Collective") or not any(x.name in self._computed for x in op.inputs):
                continue
            self._computed.update(x.name for x in op.outputs)
            if not tape.is_backward(op) and not tape.writes(op):
                met += [(op, place) for place, x in enumerate(op.inputs) if x.name not in self._computed]
        with self._own():
            self._agree(met)

    def _agree(self, met: list[tuple[tf.Operation, int]]) -> None:
        facts, repair = self._program.attachment(Facts), self._program.attachment(Repair)
        redistribution = self._program.attachment(Redistribution)
        for op, place in met:
            number = op.inputs[place]
            if number.dtype == tf.resource or tape.is_backward(number.op):
                continue
            if isinstance(facts.of(number), Partial | Unknown):
                whole = repair.whole(number, "gradient")
                if whole is not None and whole is not number:
                    redistribution.reads(op, place, whole)

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
