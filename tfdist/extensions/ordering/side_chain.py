"""Collectives that are emitted before those that are to come before them.

A rank's collectives form one chain, in the order in which they are emitted. Backward emits those of activations when it is
traced; the reductions of its gradients follow when all of it has been traced, though most could begin long before. In forward
parameters are gathered when a layer reads them, after activations that it reads, too, and the gather does not. So activations
stand on a chain of their own, the side chain, and a block between them has a place. When the rank's function has returned, edges
between both chains make them one, and the plan gets its order:

    emitted     A1 A2 A3   R0 R1 R2        A: activations, on the side chain; R: reductions, each in a block with a place
    they run    A1 R0 A2 R1 A3 R2

All else stands where it is emitted: after all that has been emitted before it.

Note: no circle. R may be given a place before A only if it does not need what A returns, nor does what stands before R on the
chain; the places of a chain never fall. So an edge from R to A leads from what does not need A to A. Ranks that share collectives
have traced the same operations, and find the same places: plans are compared before they run.
"""

import bisect
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdist import temporary
from tfdist.collectives import RankProgram

LANE = -1  # of the rank's tokens, that of the side chain; others are those of `transports.chunked`


@dataclasses.dataclass
class Block:
    """The emissions of a block.

    Attributes:
        operations: their numbers in the graph.
        records: those of the collectives in the plan.
        place: how many of the collectives of the side chain stand before it.
    """

    operations: range
    records: range
    place: int = 0


class SideChain:
    """That of one rank's trace, which the orders of its program and of its branches share."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._since: Block | None = None  # from here on the side chain has some
        self._records: list[int] = []  # of the side chain, in the plan
        self._blocks: list[Block] = []

    def on_side_chain(self) -> contextlib.AbstractContextManager[None]:
        """A block whose collectives are on the side chain. It stands in the rank's own graph."""
        self._since = self._since or self._from_here()
        return temporary.attributes(self._program, _lane=LANE)

    def note_record(self) -> None:
        """Notes that the latest record of the plan is that of a collective of the side chain."""
        self._records.append(len(self._program.plan.records[self._program.rank]) - 1)

    def collectives(self) -> list[tf.Operation]:
        """Returns those of the side chain, in order."""
        return self._on(LANE) if self._records else []

    def emitted(self) -> list[tf.Operation]:
        """Returns all collectives that the rank has emitted so far, on both chains, in that order."""
        names = {operation.name for operation in (*self._on(0), *self.collectives()) if operation.outputs}
        return [operation for operation in self._program.graph.get_operations() if operation.name in names]

    @contextlib.contextmanager
    def block(self) -> Iterator[Block]:
        """A block whose collectives get a place between those of the side chain; the caller gives it one when it is over."""
        block = self._from_here()
        yield block
        here = self._from_here()
        block.operations = range(block.operations.start, here.operations.start)
        block.records = range(block.records.start, here.records.start)
        self._blocks.append(block)

    def join(self) -> None:
        """Makes one chain of both."""
        if not self._records:
            return
        assert self._since is not None
        program = self._program
        on_chain, side = self._on(0), self.collectives()
        numbers = {operation.name: number for number, operation in enumerate(program.graph.get_operations())}
        before = [one for one in on_chain if numbers[one.name] < self._since.operations.start]
        by_number = {numbers[one.name]: one for one in (*before[-1:], *on_chain[len(before) :], *side)}
        ours = {numbers[one.name] for one in side}
        order = merged(sorted(ours), sorted(by_number.keys() - ours), [(one.operations, one.place) for one in self._blocks])
        for first, second in itertools.pairwise(order):
            if (first in ours) != (second in ours):
                by_number[second]._add_control_inputs([by_number[first]])  # noqa: SLF001
        records = program.plan.records[program.rank]
        others = set(range(len(records))).difference(self._records)
        order = merged(self._records, sorted(others), [(one.records, one.place) for one in self._blocks])
        records[:] = [records[number] for number in order]

    def _from_here(self) -> Block:
        operations, records = self._program.graph.get_operations(), self._program.plan.records[self._program.rank]
        return Block(range(len(operations), len(operations)), range(len(records), len(records)))

    def _on(self, lane: int) -> list[tf.Operation]:
        """Returns the collectives of a lane of the rank, in the order of emission; of the side chain, those of this program."""
        program = self._program
        start = 0 if self._since is None or lane != LANE else self._since.operations.start
        found = program.graph.capture(program.communicator.token(program.rank, lane)).consumers()
        known = {operation.name for operation in found}
        return [operation for operation in program.graph.get_operations()[start:] if operation.name in known]


def side_of(program: RankProgram) -> SideChain:
    """Returns the chain beside that of `program`, whose order is a `QueueOrder`."""
    side: SideChain = program.order.side  # type: ignore[attr-defined]
    return side


def merged(side: Sequence[int], others: Sequence[int], blocks: Sequence[tuple[range, int]]) -> list[int]:
    """Returns the numbers of both, each ascending, in one order; those of `others` in a block have its place, or a later one."""
    placed = [(place, 0, number) for place, number in enumerate(side, 1)]
    place = 0
    for number in others:
        given = next((given for numbers, given in blocks if number in numbers), None)
        place = max(place, bisect.bisect(side, number) if given is None else given)
        placed.append((place, 1, number))
    return [number for _, _, number in sorted(placed)]
