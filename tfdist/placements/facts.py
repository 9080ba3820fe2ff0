"""The placements of the tensors of one rank's step, found in its graph from what the rank is given on.

What they begin with is known by identity: the arguments of the rank's function, handles of variables, what collectives have
returned, and what somebody has `declared` (a Keras loss, a tape's gradient, a number that ranks have agreed on). From there the
rule of each operation is followed, through branches, loops and functions too, each operation once.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import OfBranch, RankProgram, rank_program
from tfdist.collectives.results import Results
from tfdist.graphs import tape
from tfdist.graphs.walks import before, inputs_first, reached
from tfdist.placements.constants import value_of
from tfdist.placements.graph_facts import GraphFacts
from tfdist.placements.kinds import How, Lengths, Partial, Placement, Replicate, Shard, Unknown, Why
from tfdist.placements.rank_rows import RankRows
from tfdist.placements.traced_call import TracedCall


class Facts(GraphFacts, OfBranch):
    """Those of the graph in which a rank's function is traced. A part of its state, and of a branch's.

    Attributes:
        declared: by its name, the placement of a tensor of which more was said than its operation says; of the handle of a
            variable, that of what is read of it.
    """

    def __init__(self, program: RankProgram):
        super().__init__(program.part(Results))
        self._program = program
        self.static_rows = self.local_static_rows if program.are_sizes_equal else ()
        self._rows = program.part(RankRows)
        given = given_placements(program) if program.outer is None else []
        given = [(x, placement) for x, placement in given if tf.is_symbolic_tensor(x) or placement != Replicate()]
        # A tensor of the graph is captured as it is.
        self.declared: dict[str, Placement] = {program.graph.capture(x).name: placement for x, placement in given}
        self._reconnected, self._num_reconnected = tape.reconnected(program.graph), 0
        self._agreed: dict[str, bool] = {}
        self._assumed: dict[tuple[str, int], Placement] = {}

    def of(self, tensor: tf.Tensor) -> Placement:
        if len(self._reconnected) > self._num_reconnected:
            new = self._reconnected[self._num_reconnected :]
            self._num_reconnected = len(self._reconnected)
            self.forget([x for op in new for x in op.outputs])
        return super().of(tensor)

    @functools.cached_property
    def local_static_rows(self) -> frozenset[int]:
        """Numbers of rows of this process's ranks that are known when the graph is traced."""
        if self._program.sizes is not None:
            return self._program.sizes
        leaves = [x for x in tf.nest.flatten(self._program.arguments) if tf.is_tensor(x) and x.shape.rank]
        return frozenset(x.shape[0] for x in leaves if x.shape[0] is not None and self._program.is_dealt(x))

    def _call_of(self, op: tf.Operation, inputs: tuple[Placement, ...]) -> TracedCall:
        return TracedCall(op, inputs, are_sizes_equal=self._program.are_sizes_equal, is_of_agreed=self.is_of_agreed)

    def own_rows_first(self, tensor: tf.Tensor) -> bool:
        """Whether the first axis of `tensor` may be the rank's rows: their number, or one that is not known."""
        return bool(tensor.shape.rank) and (tensor.shape[0] is None or tensor.shape[0] in self.local_static_rows)

    def declare(self, tensor: tf.Tensor, placement: Placement) -> None:
        """Says what the placement of `tensor` is, whatever it is computed of."""
        if tf.is_symbolic_tensor(tensor):
            self.declared[tensor.name] = placement
            self.forget([tensor])

    def declare_agreed(self, tensor: tf.Tensor) -> None:
        """Says that `tensor` is what ranks have agreed on."""
        self.declare(tensor, Replicate())
        self._agreed[tensor.name] = True

    def is_agreed(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is the same on all ranks since they have agreed on what it is computed of."""
        if not self._agreed or not isinstance(self.of(tensor), Replicate):
            return False
        for current in inputs_first(tensor, self._agreed_inputs, self._agreed):
            self._agreed[current.name] = any(self._agreed[x.name] for x in self._agreed_inputs(current))
        return self._agreed[tensor.name]

    def is_of_agreed(self, tensor: tf.Tensor) -> bool:
        """Whether something that `tensor` is computed of is what ranks have agreed on, or is assumed to be."""
        assumed = {name for (name, _), placement in self._assumed.items() if placement == Replicate()}
        return bool(self._agreed or assumed) and any(self._agreed.get(x.name) or x.op.name in assumed for x in before(tensor))

    def _agreed_inputs(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        return [x for x in self._inputs(tensor, {}) if x.dtype != tf.resource and isinstance(self.of(x), Replicate)]

    @contextlib.contextmanager
    def assuming(self) -> Iterator[Callable[[tf.Operation, int, Placement], None]]:
        """A block in which an operation may be assumed to read something of another placement at one of its inputs, or to return
        it (place -1: as its first output, -2: its second); after it all is as it was."""
        assumed: dict[tuple[str, int], tf.Operation] = {}

        def assume(op: tf.Operation, place: int, placement: Placement) -> None:
            assumed[op.name, place] = op
            if place < 0:
                self.declared[op.outputs[-1 - place].name] = placement
            else:
                self._assumed[op.name, place] = placement
            self.forget(op.outputs)

        try:
            yield assume
        finally:
            for (name, place), op in assumed.items():
                if place < 0:
                    del self.declared[op.outputs[-1 - place].name]
                self._assumed.pop((name, place), None)
                self.forget(op.outputs)

    def _read_by(self, op: tf.Operation) -> tuple[Placement, ...]:
        read = super()._read_by(op)
        return tuple(self._assumed.get((op.name, place), x) for place, x in enumerate(read)) if self._assumed else read

    def forget(self, tensors: Iterable[tf.Tensor]) -> None:
        """Forgets the placements of `tensors` and of what is computed of them: something in front of them has changed."""
        waiting = [x for x in tensors if x.name in self._known]
        for x in waiting:
            if not self._agreed.get(x.name):
                self._agreed.pop(x.name, None)
            if self._known.pop(x.name, None) is not None:
                waiting.extend(output for op in x.consumers() for output in op.outputs if output.name in self._known)

    def out_of(self, graph: tf.Graph, given: Sequence[Placement]) -> list[Placement]:
        """Of a branch that has sent something, what is known there; it may read sums by now of what it has captured."""
        inner = self._program.of_traced(graph)
        if inner is None:
            return super().out_of(graph, given)
        facts = inner.part(Facts)
        for x, placement in zip(graph.inputs, given, strict=False):
            if x.dtype != tf.resource and facts.of(x) != placement:
                facts.declare(x, placement)
        return [facts.of(x) for x in graph.outputs]

    def reasons_of(self, tensor: tf.Tensor) -> list[tf.Operation]:
        """Returns the operations that make `tensor` unknown, of inputs that are known, or capture what is not."""

        def unknown(x: tf.Tensor) -> list[tf.Tensor]:
            return [y for y in self._inputs(x, {}) if isinstance(self.of(y), Unknown)]

        made = (x for x in reached([tensor], unknown) if self._source(x) is None or self.outside_of(x) is not None)
        # Beside inputs that its rule ignores, too.
        return list({x.op.name: x.op for x in made if self.of(x) not in map(self.of, unknown(x))}.values())

    def _leaf(self, tensor: tf.Tensor) -> Placement | tf.Tensor | None:
        if tensor.name in self.declared:
            return self.declared[tensor.name]
        if self._rows.is_weight(tensor):
            return Partial(How.SHARE)
        if (found := self._of_collective(tensor)) is not None:
            return found
        outside = self.outside_of(tensor)
        return None if outside is None else outside[0].part(Facts).of(outside[1])

    def outside_of(self, tensor: tf.Tensor) -> tuple[RankProgram, tf.Tensor] | None:
        """Returns what a branch has captured as `tensor`, and the program that made it; None: it has not."""
        if tensor.op.type != "Placeholder" or self._program.outer is None:
            return None
        outer = next((outer for outer, inner in self._program.graph.captures if inner.name == tensor.name), None)
        is_tensor = outer is not None and tf.is_symbolic_tensor(outer) and outer.dtype != tf.resource
        made_by = self._program.outer.that_made(outer) if is_tensor else None
        return None if made_by is None else (made_by, outer)


def axes_of_static_rows(x: Any) -> tuple[int, ...]:
    """Returns the axes of `x` along which rows of the rank whose step is traced here may lie, their number known to the trace."""
    program = rank_program(peers_on="data")
    if program is None or program.is_eager or not (tf.is_symbolic_tensor(x) and x.shape.rank and program.exists_here(x)):
        return ()
    facts = program.part(Facts)
    rows = facts.local_static_rows - {0}
    if not rows or program.part(RankRows).are_of_slices:  # of a microbatch, which nobody makes that of all
        return ()
    placement = facts.of(x)
    if isinstance(placement, Unknown):
        sizes = [(axis, size) for axis, size in enumerate(x.shape) if size is not None]
        return tuple(axis for axis, size in sizes if size in rows or any(n > 1 and size % n == 0 for n in rows))
    return (placement.axis,) if isinstance(placement, Shard) else ()


_KEEP_ROWS = "BatchMatMulV2 Cumsum Einsum MatMul RandomShuffle ReverseV2 Roll Softmax".split()


def keeps_rows(op: tf.Operation) -> bool:
    """Whether `op`, in which rows meet, returns as many as it is given: in another order, or each with something of all."""
    if op.type == "StridedSlice":
        step, is_all = value_of(op.inputs[3]), op.get_attr("begin_mask") & op.get_attr("end_mask") & 1
        return step is not None and step[0] == -1 and bool(is_all)
    return op.type in _KEEP_ROWS


def have_met(x: Any) -> bool:
    """Whether rows of the batch have met in `x`, or it is of something else that a rank's own rows do not tell."""
    program = rank_program(peers_on="data")
    here = None if program is None or program.is_eager or program.mesh.splits_layers else program.here()
    is_here = here is not None and tf.is_symbolic_tensor(x) and here.exists_here(x)
    return is_here and isinstance(here.part(Facts).of(x), Unknown)


def has_rows_of_branch(x: tf.Tensor) -> bool:
    """Whether `x`, made in a branch that has sent nothing, has as many numbers for each of the rank's rows as on other ranks."""
    program = rank_program(peers_on="data")
    if program is None or program.is_eager or x.graph not in program.branch_points or program.of_traced(x.graph) is not None:
        return False
    found = program.of_branch(x.graph).part(Facts).of(x)
    return isinstance(found, Shard) and found.is_even and found.axis == 0 and x.shape[1:].is_fully_defined()


def given_placements(program: RankProgram) -> list[tuple[tf.Tensor, Placement]]:
    """Returns the tensors that the function of a rank is given, with their placements: what is dealt to ranks has rows."""
    found: list[tuple[tf.Tensor, Placement]] = []
    for leaf in tf.nest.flatten(program.arguments):
        parts = tf.nest.flatten(leaf, expand_composites=True) if leaf is not None else []
        for x in filter(tf.is_tensor, parts):
            name = x.name if tf.is_symbolic_tensor(x) else f"{x.shape[0] if x.shape.rank else 'no'} rows"
            found.append((x, _placement_of_given(x, leaf, name) if program.is_dealt(leaf) else Replicate()))
    return found


def _placement_of_given(x: tf.Tensor, leaf: Any, name: str) -> Placement:
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):  # numbers of rows count within a rank
        values = leaf.flat_values if isinstance(leaf, tf.RaggedTensor) else leaf.values
        is_shape = isinstance(leaf, tf.SparseTensor) and x is leaf.dense_shape
        return Shard(0, is_even=False) if x is values else Lengths() if is_shape else Unknown(Why.GIVEN, name)
    if x.dtype in (tf.resource, tf.variant) or x.shape.rank == 0:
        return Unknown(Why.GIVEN, name)
    return Shard(0, (name,))
