"""Branches that need numbers of all ranks, such as a mean over the rows of a mask that is not empty.

    tf.cond(turn, lambda: tf.sqrt(tf.reduce_mean(errors)), lambda: 0.0)

Nothing is sent in a branch that has a way back. So the numbers are computed before it, where the same branch is taken:

    number = tf.cond(turn, lambda: tf.reduce_mean(errors), lambda: 0.0)     and the ranks agree on it
    tf.cond(turn, lambda: tf.sqrt(number), lambda: 0.0)

What the branch that is not taken divides by, or takes the logarithm of, is not computed, as before. A branch of a branch becomes
one of a `tf.switch_case`.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfdist.collectives import OfBranch, RankProgram
from tfdist.collectives.branches import writes_to
from tfdist.graphs import records, tape
from tfdist.graphs.walks import before
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import How, Partial, Replicate, Shard, Unknown
from tfdist.placements.plan import OUTPUT, RepairPlan, Want
from tfdist.placements.redistribute import Redistribution
from tfdist.placements.remaking import Remaking

_Waves = list[list[Want]]
_Copy = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]  # makes tensors of a branch again where it is called
_Reads = dict[tuple[str, int], tuple[tf.Tensor, ...]]  # what an operation of a branch reads, or returns; a mean's sum and number


class Opening(OfBranch):
    """The branches of one rank's program that were opened. A part of its state, and of a branch's."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._facts = program.part(Facts)
        self._redistribution = program.part(Redistribution)
        self._remaking = program.part(Remaking)

    def opened(self, op: tf.Operation, target: tf.Tensor, label: str) -> bool:
        """Lets a `tf.cond`, or a `tf.switch_case`, compute what `target` needs of it of what ranks have agreed on; False: that
        cannot be done."""
        graphs = tape.traced_branches(op) if op.type in tape.BRANCHES and op.graph is self._program.graph else []
        if not graphs or tape.is_backward(op) or self._program.has_sent_in(op) or self._facts.of(op.inputs[0]) != Replicate():
            return False
        can_be_read = all(self._is_as_it_was(x, op) for x in op.inputs if x.dtype == tf.resource)
        if len(graphs[0].outputs) != len(op.outputs) or not can_be_read or not all(map(self._can_be_made_again, graphs)):
            return False
        needed = {x.name for x in before(target)}
        asked = [place for place, x in enumerate(op.outputs) if x.name in needed and isinstance(self._facts.of(x), Unknown)]
        plans = [self._plan_of(op, graph, [graph.outputs[place] for place in asked]) for graph in graphs]
        if None in plans:
            flat = self._flattened(op, graphs, label)
            return flat is not None and self.opened(flat, self._remaking.now(target), label)
        plans = plans if any(plans) else self._plans_of_outputs(op, graphs, asked)
        reads = self._agreed(op, graphs, plans, label) if any(plans) else None
        if reads is None:
            return False
        makers = [lambda copy, graph=graph: copy(graph.outputs) for graph in graphs]
        self._replace(op, self._selected(op, op.inputs[0], makers, graphs, reads))
        return True

    def _is_as_it_was(self, handle: tf.Tensor, op: tf.Operation) -> bool:
        """Whether a variable that `op` reads, the same on all ranks, has not been written since."""
        numbers = {one.name: number for number, one in enumerate(self._program.graph.get_operations())}
        later = (one for one in handle.consumers() if numbers[one.name] > numbers[op.name])
        return not isinstance(self._facts.of(handle), Shard) and not any(writes_to(handle, one) for one in later)

    def _can_be_made_again(self, graph: tf.Graph) -> bool:
        """Whether a branch is pure, and nothing is known of it but what its operations say."""
        program = self._program.of_traced(graph)
        says_nothing = program is None or program.part(Facts).declared.keys() <= {x.name for x in graph.inputs}
        return says_nothing and all(map(self._is_pure, graph.get_operations()))

    def _is_pure(self, op: tf.Operation) -> bool:
        if op.type in tape.BRANCHES:
            graphs = tape.traced_branches(op)
            return bool(graphs) and all(map(self._can_be_made_again, graphs))
        is_known = tape.can_be_made_again(op) and op.type != "IdentityN" and records.has_gradient(op)
        return is_known or op.type in ("Const", "NoOp", "Placeholder", "ReadVariableOp")

    def _facts_in(self, op: tf.Operation, graph: tf.Graph) -> tuple[Facts, RepairPlan]:
        branch = self._program.of_branch(graph)
        facts, plan = branch.part(Facts), branch.part(RepairPlan)
        plan.bears_shares = False
        for x, outside in zip(graph.inputs, list(op.inputs)[1:], strict=True):
            facts.declare(x, self._facts.of(outside))
            if self._facts.is_agreed(outside):
                facts.declare_agreed(x)
        return facts, plan

    def _plan_of(self, op: tf.Operation, graph: tf.Graph, targets: Sequence[tf.Tensor]) -> _Waves | None:
        """Returns what is to be agreed on for `targets`, of a branch, one after the other; None: they cannot be known."""
        _, plan = self._facts_in(op, graph)
        waves: _Waves = []
        for x in targets:
            found, lost = plan.of(x, may_gather=False)
            wants = list(itertools.chain(*found))
            are_numbers = all(want.place != OUTPUT or want.op.type == "Mean" for want in wants)
            if lost or not are_numbers or not all(want.tensor.shape.is_fully_defined() for want in wants):
                return None
            waves = [one + other for one, other in itertools.zip_longest(waves, found, fillvalue=list[Want]())]
        return waves

    def _plans_of_outputs(self, op: tf.Operation, graphs: Sequence[tf.Graph], asked: Sequence[int]) -> list[_Waves]:
        """Returns plans by which outputs are agreed on that are numbers of different kinds in one branch and in another."""
        plans: list[_Waves] = []
        for graph in graphs:
            facts, _ = self._facts_in(op, graph)
            unknown = [graph.outputs[place] for place in asked]
            numbers = [x for x in unknown if isinstance(facts.of(x), Partial)]
            if any(not isinstance(facts.of(x), Partial | Replicate) or not x.shape.is_fully_defined() for x in unknown):
                return []
            plans.append([[Want(x.op, OUTPUT, x, Replicate()) for x in numbers]] if numbers else [])
        return plans

    def _agreed(self, op: tf.Operation, graphs: Sequence[tf.Graph], plans: Sequence[_Waves], label: str) -> list[_Reads] | None:
        """Returns what ranks have agreed on as `plans` want it, for each branch what its operations are to read."""
        reads: list[_Reads] = [{} for _ in graphs]
        for waves in itertools.zip_longest(*plans, fillvalue=list[Want]()):
            wants = [(number, want) for number, wave in enumerate(waves) for want in wave]
            different = {(number, want.tensor.name, want.place == OUTPUT): (number, want) for number, want in wants}
            makers = [functools.partial(_numbers_in, number, list(different.values())) for number in range(len(graphs))]
            found = self._selected(op, op.inputs[0], makers, graphs, reads)
            if any(isinstance(self._facts.of(x), Unknown) for x in found):
                return None
            self._redistribution.agree([x for x in found if isinstance(self._facts.of(x), Partial)], f"agree/{label}")
            agreed = (x if (whole := self._redistribution.found(x)) is None else whole for x in found)
            sizes = {key: 1 + _is_over_some_rows(want) for key, (_, want) in different.items()}
            known = {key: tuple(itertools.islice(agreed, size)) for key, size in sizes.items()}
            for number, want in wants:
                reads[number][want.op.name, want.place] = known[number, want.tensor.name, want.place == OUTPUT]
        return reads

    def _flattened(self, op: tf.Operation, graphs: Sequence[tf.Graph], label: str) -> tf.Operation | None:
        """Returns a `tf.switch_case` of the branches of `op` and of those of the first branch in one of them; None: there is
        none."""
        inside = ((number, one) for number, graph in enumerate(graphs) for one in graph.get_operations())
        place, inner = next(((number, one) for number, one in inside if one.type in tape.BRANCHES), (0, None))
        plan = None if inner is None else self._plan_of(op, graphs[place], inner.inputs[:1])
        reads = (
            None if plan is None else self._agreed(op, graphs, [plan if n == place else [] for n in range(len(graphs))], label)
        )
        if reads is None:
            return None
        arms = len(tape.traced_branches(inner))

        def index(number: int, copy: _Copy) -> list[tf.Tensor]:
            if number != place:
                return [tf.constant(number if number < place else number + arms - 1)]
            (selector,) = copy(inner.inputs[:1])
            return [place + (tf.where(selector, 0, 1) if selector.dtype.is_bool else selector)]

        numbers = range(len(graphs))
        (found,) = self._selected(op, op.inputs[0], [functools.partial(index, n) for n in numbers], graphs, reads)
        taken = [(n, arm) for n in numbers for arm in (range(arms) if n == place else [0])]
        makers = [lambda copy, n=n: copy(graphs[n].outputs) for n, _ in taken]
        choices = [{inner.name: arm} if n == place else {} for n, arm in taken]
        new = self._selected(op, found, makers, [graphs[n] for n, _ in taken], [reads[n] for n, _ in taken], choices)
        self._replace(op, new)
        return new[0].op.inputs[0].op if new[0].op.type == "Identity" else new[0].op

    def _replace(self, op: tf.Operation, outputs: Sequence[tf.Tensor]) -> None:
        for old, new in zip(op.outputs, outputs, strict=True):
            self._remaking.replace(old, new)

    def _selected(
        self,
        op: tf.Operation,
        selector: tf.Tensor,
        makers: Sequence[Callable[[_Copy], list[tf.Tensor]]],
        graphs: Sequence[tf.Graph],
        reads: Sequence[_Reads],
        choices: Sequence[Mapping[str, int]] | None = None,
    ) -> list[tf.Tensor]:
        """Returns what the one of `makers` that `selector` selects makes of a copy of its branch of `op`."""
        chosen = choices or [{}] * len(graphs)
        given = list(op.inputs)[1:]

        def branch(number: int) -> Callable[[], list[tf.Tensor]]:
            graph, of_branch = graphs[number], (reads[number], chosen[number])
            return lambda: makers[number](functools.partial(_copied, graph, *of_branch, _given(graph, given)))

        branches = list(map(branch, range(len(graphs))))
        self._program.root.trusted.append(selector)
        return self._redistribution.make(lambda: _select(selector, branches))


def _is_over_some_rows(want: Want) -> bool:
    """Whether it is a mean whose sum and whose number of rows are agreed on."""
    return want.place == OUTPUT and want.becomes == Partial(How.MEAN)


def _numbers_in(own: int, wants: Sequence[tuple[int, Want]], copy: _Copy) -> list[tf.Tensor]:
    """Returns what is agreed on for `wants`, in the branch number `own`."""
    return [x for number, want in wants for x in _numbers_of(want, copy if number == own else None)]


def _numbers_of(want: Want, copy: _Copy | None) -> list[tf.Tensor]:
    """Returns what is agreed on for `want` in the branch that is copied; None: zeros for that of another branch."""
    shape, dtype = want.tensor.shape, want.tensor.dtype
    if copy is None:
        return [tf.zeros(shape, dtype), tf.zeros([], dtype)][: 1 + _is_over_some_rows(want)]
    if not _is_over_some_rows(want):
        return copy([want.tensor])
    x, axes = copy(want.op.inputs)
    total = tf.reduce_sum(x, axes, keepdims=want.op.get_attr("keep_dims"))
    return [total, tf.cast(tf.size(x), dtype) / shape.num_elements()]


def _given(graph: tf.Graph, inputs: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
    return {x.name: outside for x, outside in zip(graph.inputs, inputs, strict=True)}


def _select(selector: tf.Tensor, branches: Sequence[Callable[[], list[tf.Tensor]]]) -> list[tf.Tensor]:
    return tf.cond(selector, *branches) if selector.dtype.is_bool else tf.switch_case(selector, list(branches))


def _copied(
    graph: tf.Graph, reads: _Reads, chosen: Mapping[str, int], known: dict[str, tf.Tensor], wanted: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns copies, in the graph that is being built, of `wanted`, of a branch; of a branching that is `chosen`, by its name,
    of that branch alone. `known` says what tensors of the branch are here, by name; what is copied is added."""
    inputs_of = {key: new for key, (new, *_) in reads.items()}
    needed = tape.ancestors(list(wanted), graph.get_operations(), by_control=False)
    for op in (one for one in graph.get_operations() if one in needed and one.outputs[0].name not in known):
        if op.type not in tape.BRANCHES:
            tape.copy_all([op], known, inputs_of)
            if (op.name, OUTPUT) in reads:
                total, *number = reads[op.name, OUTPUT]
                known[op.outputs[0].name] = total / number[0] if number else total
            continue
        selector, *inputs = [known[x.name] for x in op.inputs]
        arms = [functools.partial(_copied, arm, {}, {}, _given(arm, inputs), arm.outputs) for arm in tape.traced_branches(op)]
        made = arms[chosen[op.name]]() if op.name in chosen else _select(selector, arms)
        known.update((x.name, new) for x, new in zip(op.outputs, made, strict=True))
    return [known[x.name] for x in wanted]
