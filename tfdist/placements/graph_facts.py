"""The placements of the tensors of any graph, from those of what it begins with: the rule of each operation is followed, once.

Branches, loops and functions are graphs within, of which only the placements of what goes in and comes out are seen outside.
"""

import abc
import functools
from collections.abc import Collection, Mapping, Sequence

import tensorflow as tf

from tfdist.collectives.results import Results
from tfdist.graphs import tape
from tfdist.graphs.walks import inputs_first, is_of_users, reached
from tfdist.placements.constants import value_of
from tfdist.placements.kinds import How, Partial, Placement, Replicate, Shard, Unknown, Why
from tfdist.placements.table import is_elementwise, is_quotient, placements_of
from tfdist.placements.traced_call import TracedCall

LEAVES = ("Placeholder", "ReadVariableOp", "VarHandleOp")


class GraphFacts(abc.ABC):
    """The placements of the tensors of one graph.

    Attributes:
        static_rows: numbers of rows of a rank that are known when the graph is traced.
        taken_for_rows: the user's divisions of sums over rows by a constant that is taken for the rank's own number of rows.
    """

    def __init__(self, results: Results | None = None, static_rows: Collection[int] = ()) -> None:
        self.taken_for_rows: list[tf.Operation] = []
        self._results = results  # of collectives
        self.static_rows = static_rows
        self._known: dict[str, Placement] = {}
        self._inner: dict[tuple[tf.Graph, int, tuple[Placement, ...]], list[Placement]] = {}

    def of(self, tensor: tf.Tensor) -> Placement:
        """Returns the placement of `tensor`, of this graph."""
        if tensor.name in self._known:
            return self._known[tensor.name]
        sources: dict[str, Placement | tf.Tensor | None] = {}
        for current in inputs_first(tensor, functools.partial(self._inputs, sources=sources), self._known):
            if (source := sources[current.name]) is not None:
                self._known[current.name] = self._known[source.name] if isinstance(source, tf.Tensor) else source
                continue
            for output, placement in zip(current.op.outputs, self._look(current.op), strict=True):
                self._known.setdefault(output.name, placement)
        return self._known[tensor.name]

    def inputs_of(self, op: tf.Operation) -> tuple[Placement, ...]:
        """Returns the placements of the inputs of `op`, of this graph."""
        for x in op.inputs:
            self.of(x)
        return self._read_by(op)

    def _call_of(self, op: tf.Operation, inputs: tuple[Placement, ...]) -> TracedCall:
        return TracedCall(op, inputs)

    @abc.abstractmethod
    def _leaf(self, tensor: tf.Tensor) -> Placement | tf.Tensor | None:
        """Returns the placement of a tensor of which more is known than its operation says, or another one that it is like."""

    def _of_collective(self, tensor: tf.Tensor) -> Placement | tf.Tensor | None:
        """Returns what `_leaf` does, of what a collective has returned."""
        result = None if self._results is None else self._results.of(tensor)
        if result is None:
            return None
        if result.is_same:
            return Replicate()
        return Unknown(Why.NO_RULE, named(tensor.op)) if result.is_of_all else result.like

    def _source(self, tensor: tf.Tensor) -> Placement | tf.Tensor | None:
        found = self._leaf(tensor)
        if found is None and tensor.op.type == "IdentityN":  # the end of a custom gradient
            return tensor.op.inputs[tensor.value_index]
        return found

    def _inputs(self, tensor: tf.Tensor, sources: dict[str, Placement | tf.Tensor | None]) -> Sequence[tf.Tensor]:
        """Returns what the placement of `tensor` is computed of; adds its source to `sources`."""
        source = self._source(tensor)
        sources[tensor.name] = source
        return tensor.op.inputs if source is None else [source] if isinstance(source, tf.Tensor) else []

    def _read_by(self, op: tf.Operation) -> tuple[Placement, ...]:
        return tuple(self._known[x.name] for x in op.inputs)

    def _look(self, op: tf.Operation) -> list[Placement]:
        found = self._by_rule(op)
        if is_quotient(op.type) and found == [Partial(How.SUM)] and self._divides_by_own_rows(op):
            self.taken_for_rows += [op] if op.traceback and is_of_users(op) else []
            return [Partial(How.MEAN)]
        return found

    def _divides_by_own_rows(self, op: tf.Operation) -> bool:
        """Whether a sum over rows is divided by the rank's own number of them, or of what is summed, known when it is traced: a
        constant like any other."""
        divisor = None if self._read_by(op)[1] == Partial(How.REPLICAS) else value_of(op.inputs[1])
        if divisor is None or divisor.size != 1 or not self.static_rows or float(divisor.reshape(-1)[0]) <= 1:
            return False
        sizes = set(self.static_rows)
        for x in reached([op.inputs[0]], lambda x: x.op.inputs if is_elementwise(x.op.type) else ()):
            summed = None if is_elementwise(x.op.type) or not x.op.inputs else x.op.inputs[0]
            if summed is not None and summed.shape.is_fully_defined() and summed.shape.rank:
                sizes |= {summed.shape.num_elements()} if summed.shape[0] in self.static_rows else set()
                found = self._known.get(summed.name)
                sizes |= {summed.shape[found.axis]} if isinstance(found, Shard) and found.is_joined else set()  # parts together
        return float(divisor.reshape(-1)[0]) in sizes

    def _by_rule(self, op: tf.Operation) -> list[Placement]:
        inputs = self._read_by(op)
        if op.type in LEAVES or op.type == "Const":
            return [x if isinstance(x, Shard) else Replicate() for x in inputs] or [Replicate()] * len(op.outputs)
        if op.type in tape.BRANCHES:
            return _joined_branches(self, op, inputs)
        if op.type in tape.LOOPS:
            return self._out_of_loop(op, inputs)
        called = tape.called(op)
        return placements_of(self._call_of(op, inputs)) if called is None else self.out_of(called, inputs)

    def out_of(self, graph: tf.Graph, given: Sequence[Placement]) -> list[Placement]:
        """Returns the placements of what a function, traced as `graph`, returns for inputs with the placements `given`."""
        key = graph, len(graph.outputs), tuple(given)
        if key not in self._inner:
            names = [x.name for x in graph.inputs]
            inside = GivenFacts(dict(zip(names, given, strict=False)), self._results, self.static_rows)
            inside.taken_for_rows = self.taken_for_rows
            self._inner[key] = [inside.of(x) for x in graph.outputs]
        return self._inner[key]

    def _out_of_loop(self, op: tf.Operation, inputs: tuple[Placement, ...]) -> list[Placement]:
        """What goes round is what it was and what the body makes of that, until neither changes."""
        body, carried = tape.body(op), list(inputs)
        for place, x in enumerate(op.inputs):  # a state of zeros for each of the rank's rows
            if x.shape.rank and x.shape[0] in self.static_rows and isinstance(carried[place], Replicate) and is_zero(x):
                carried[place] = Shard()
        for _ in range(len(carried) + 2):
            found = self.out_of(body, carried)
            joined = [
                _joined(one, other, op, is_zero=is_zero(x)) for x, one, other in zip(op.inputs, carried, found, strict=False)
            ]
            if joined == carried[: len(joined)]:
                break
            carried = [*joined, *carried[len(joined) :]]
        condition = self.out_of(tape.condition(op), carried)[0]
        if not isinstance(condition, Replicate):
            why = condition if isinstance(condition, Unknown) else Unknown(Why.FUNCTION, named(op))
            return [why] * len(op.outputs)
        return carried[: len(op.outputs)]


class GivenFacts(GraphFacts):
    """Those of a graph of which it is known what some tensors are, by their names: what a function was given, say."""

    def __init__(self, given: Mapping[str, Placement], results: Results | None = None, static_rows: Collection[int] = ()) -> None:
        super().__init__(results, static_rows)
        self._given = given

    def _leaf(self, tensor: tf.Tensor) -> Placement | tf.Tensor | None:
        return self._given.get(tensor.name, self._of_collective(tensor))


class TracedFacts(GivenFacts):
    """Those of a function that was traced by itself: its arguments are rows, what it captures of other graphs is not known."""

    def __init__(self, graph: tf.Graph) -> None:
        given: dict[str, Placement] = {}
        captured = {inner.name: outer for outer, inner in graph.captures}
        for x in graph.inputs:
            is_constant = x.name in captured and not tf.is_symbolic_tensor(captured[x.name])
            is_rows = x.name not in captured and x.shape.rank
            given[x.name] = Replicate() if is_constant else Shard(0, (x.name,)) if is_rows else Unknown(Why.GIVEN, x.op.name)
        super().__init__(given)


def _joined_branches(facts: GraphFacts, op: tf.Operation, inputs: tuple[Placement, ...]) -> list[Placement]:
    if isinstance(inputs[0], Unknown):
        return [inputs[0]] * len(op.outputs)
    if not isinstance(inputs[0], Replicate):
        return [Unknown(Why.FUNCTION, named(op))] * len(op.outputs)
    graphs = tape.traced_branches(op) or tape.branches(op)
    if any(len(graph.outputs) < len(op.outputs) for graph in graphs):
        return [Unknown(Why.NO_RULE, named(op))] * len(op.outputs)
    branches = [facts.out_of(graph, inputs[1:]) for graph in graphs]
    joined = []
    for place in range(len(op.outputs)):
        found = [one[place] for one in branches]
        are_zero = [is_zero(graph.outputs[place]) and isinstance(x, Replicate) for graph, x in zip(graphs, found, strict=True)]
        if any(isinstance(x, Partial) for x in found):  # of which zeros are one, too
            found = [x for x, zero in zip(found, are_zero, strict=True) if not zero]
        joined.append(functools.reduce(lambda one, other: _joined(one, other, op), found))
    return joined


def _joined(one: Placement, other: Placement, op: tf.Operation, *, is_zero: bool = False) -> Placement:
    """Returns the placement of what is `one` or `other`, the same on all ranks."""
    if one == other or is_zero and isinstance(one, Replicate) and isinstance(other, Shard | Partial):
        return other
    if isinstance(one, Unknown) or isinstance(other, Unknown):
        return one if isinstance(one, Unknown) else other
    kinds = {one, other}
    if kinds <= {Replicate(), Replicate(is_drawn=True)}:
        return Replicate(is_drawn=True)
    if kinds <= {Replicate(), Partial(How.MEAN)}:
        return Partial(How.MEAN)
    if isinstance(one, Shard) and isinstance(other, Shard) and one.axis == other.axis and not (one.is_joined or other.is_joined):
        return Shard(one.axis, one.rows if one.rows == other.rows else (), one.is_even and other.is_even)
    return Unknown(Why.FUNCTION, named(op))


def is_zero(tensor: tf.Tensor) -> bool:
    """Whether `tensor` is nothing yet: zeros, or an empty list."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    if tensor.dtype == tf.variant:
        return tensor.op.type in ("TensorListReserve", "EmptyTensorList")
    if tensor.op.type == "ZerosLike":
        return True
    value = value_of(tensor.op.inputs[1] if tensor.op.type == "Fill" else tensor)
    return value is not None and value.size > 0 and not value.any()


def named(op: tf.Operation) -> str:
    """Returns how a warning names `op`."""
    return f"{op.type} {op.name!r}"
