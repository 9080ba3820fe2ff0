"""Gradients that are taken inside a loop or a branch of a rank's function and come out of it: which of its outputs are gradients.

    for half in halves:                                        a loop adds up a rank's summands, from zeros on:
        sums = [s + g for s, g in zip(sums, gradients(half))]  what comes out is a rank's summand
    grads = tf.cond(late, lambda: gradients(x), zeros)         a branch has a summand, or zeros

A loop can send nothing, and what is returned from a branch is a rank's own. So the sum over the ranks is made outside.
"""

from collections.abc import Callable, Mapping

import tensorflow as tf

from tfdist.collectives import Part, RankProgram
from tfdist.graphs import tape
from tfdist.sharding import gradient_graph


class CarriedGradients(Part):
    """Gradients that one rank has taken in loops and branches in one trace. A part of its state."""

    def __init__(self, program: RankProgram):
        del program
        self._taken: dict[tuple[int, str], tf.Tensor] = {}  # kept, so that the ids of their graphs stay their own

    def note(self, gradient: tf.Tensor) -> None:
        """Notes that `gradient`, in the graph of a loop or a branch, is a rank's summand."""
        self._taken[id(gradient.graph), gradient.name] = gradient

    @property
    def are_any(self) -> bool:
        """Whether some have been taken in a loop or a branch."""
        return bool(self._taken)

    def out_of(self, operation: tf.Operation) -> list[tf.Tensor]:
        """Returns the outputs of `operation` that are linear in gradients taken inside of it, with nothing added; else none."""
        found = self._linear_in(operation, lambda _: None)
        return [operation.outputs[place] for place in sorted(found) if found[place]]

    def _linear_in(
        self, operation: tf.Operation, linear_in: Callable[[tf.Tensor], frozenset[str] | None]
    ) -> dict[int, frozenset[str]]:
        """Returns, by place, the outputs of a branch or a loop that are linear in gradients taken inside, and in inputs that are
        `linear_in` something; with the gradients that are in them."""
        if operation.type not in (*tape.BRANCHES, *tape.LOOPS) or tape.is_backward(operation):
            return {}
        given: dict[int, frozenset[str]] = {}
        for place, x in enumerate(operation.inputs):
            if (found := linear_in(x)) is not None or gradient_graph.is_zero(x):
                given[place] = found or frozenset()
        if operation.type in tape.BRANCHES:
            inside = {place - 1: found for place, found in given.items()}
            of_branches = [self._linear_outputs(one, inside) for one in tape.traced_branches(operation)]
            places = set.intersection(*map(set, of_branches)) if of_branches else ()
            return {place: frozenset().union(*(one[place] for one in of_branches)) for place in places}
        while True:  # a value that goes round is the one before, and what the body makes of that
            around = self._linear_outputs(tape.body(operation), given)
            after = {place: found | around[place] for place, found in given.items() if place in around}
            if after == given:
                return given
            given = after

    def _linear_outputs(self, graph: tf.Graph, given: Mapping[int, frozenset[str]]) -> dict[int, frozenset[str]]:
        """Returns, by place, the outputs that are linear in gradients and in the inputs `given` by place; with the gradients that
        are in them, as `given` has those of inputs."""
        names = {graph.inputs[place].name: found for place, found in given.items()}

        def leaf(x: tf.Tensor) -> frozenset[str] | None:
            if (id(x.graph), x.name) in self._taken:
                return frozenset([x.name])
            if x.name in names or gradient_graph.is_zero(x):
                return names.get(x.name, frozenset())
            return self._linear_in(x.op, linear.of).get(x.value_index)

        linear = gradient_graph.Derived(leaf)
        return {place: found for place, x in enumerate(graph.outputs) if (found := linear.of(x)) is not None}
