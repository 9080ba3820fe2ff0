"""Gradients that are taken inside a loop or a branch of a rank's function and come out of it: which of its outputs are gradients.

    for half in halves:                                        a loop adds up a rank's summands, from zeros on:
        sums = [s + g for s, g in zip(sums, gradients(half))]  what comes out is a rank's summand
    grads = tf.cond(late, lambda: gradients(x), zeros)         a branch has a summand, or zeros

A loop can send nothing, and what is returned from a branch is a rank's own. So the sum over the ranks is made outside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.graphs import tape
from tfdist.sharding import gradient_graph

_BRANCHING = ("Case", "If", "StatelessCase", "StatelessIf")
_PASSING = ("BroadcastTo", "Cast", "Identity", "Reshape")

IsGradient = Callable[[tf.Tensor], bool]


class CarriedGradients:
    """What has been taken in loops and branches of one rank's program in one trace; an attachment of the rank's program."""

    def __init__(self, program: RankProgram):
        del program
        self._taken: set[tuple[int, str]] = set()
        self._graphs: list[tf.Graph] = []  # kept, so that their ids stay their own

    def note(self, gradient: tf.Tensor) -> None:
        """Notes that `gradient`, in the graph of a loop or a branch, is a rank's summand."""
        self._taken.add((id(gradient.graph), gradient.name))
        self._graphs.append(gradient.graph)

    def out_of(self, operation: tf.Operation) -> list[tf.Tensor]:
        """Returns the outputs of `operation` that are linear in gradients taken inside of it, with nothing added; else none."""
        found = self._linear_in(operation, lambda _: False) if self._taken else {}
        return [operation.outputs[place] for place in sorted(found) if found[place]]

    def _linear_in(self, operation: tf.Operation, is_sum: IsGradient) -> dict[int, bool]:
        """Returns the places of outputs that are linear in gradients taken inside, and in inputs that `is_sum`; and whether there
        is a gradient in them."""
        if operation.type not in (*_BRANCHING, *tape.LOOPS) or tape.is_backward(operation):
            return {}
        if operation.type in tape.LOOPS:
            return self._out_of_loop(operation, is_sum)
        given = [place for place, source in enumerate(operation.inputs[1:]) if is_sum(source) or _is_zero(source)]
        found = [self._linear_outputs(branch, given) for branch in tape.traced_branches(operation)]
        return {
            place: any(one[place] for one in found) for place in (found[0] if found else ()) if all(place in x for x in found)
        }

    def _out_of_loop(self, operation: tf.Operation, is_sum: IsGradient) -> dict[int, bool]:
        summed = {place for place, source in enumerate(operation.inputs) if is_sum(source) or _is_zero(source)}
        while True:
            found = self._linear_outputs(tape.body(operation), summed)
            if not summed - found.keys():
                return {place: found[place] for place in summed}
            summed &= found.keys()

    def _linear_outputs(self, graph: tf.Graph, given: Collection[int]) -> dict[int, bool]:
        """Returns the places of outputs that are linear in gradients and in the inputs at the places `given`; and whether a
        gradient is in them."""
        names = {graph.inputs[place].name for place in given}
        known: dict[str, bool | None] = {}
        found = {place: self._holds(x, lambda y: y.name in names, known) for place, x in enumerate(graph.outputs)}
        return {place: holds for place, holds in found.items() if holds is not None}

    def _holds(self, tensor: tf.Tensor, is_sum: IsGradient, known: dict[str, bool | None]) -> bool | None:
        """Returns whether `tensor`, linear in gradients and sums, has a gradient in it; None: it is not linear."""
        if tensor.name not in known:
            known[tensor.name] = self._look(tensor, is_sum, known)
        return known[tensor.name]

    def _look(self, tensor: tf.Tensor, is_sum: IsGradient, known: dict[str, bool | None]) -> bool | None:
        if not tensor.dtype.is_floating:
            return None
        if (id(tensor.graph), tensor.name) in self._taken:
            return True
        if is_sum(tensor) or _is_zero(tensor):
            return False
        if (source := gradient_graph.passed_on(tensor)) is not None:
            return self._holds(source, is_sum, known)
        if tensor.op.type in (*_BRANCHING, *tape.LOOPS):
            return self._linear_in(tensor.op, lambda x: self._holds(x, is_sum, known) is not None).get(tensor.value_index)
        if not gradient_graph.may_be_linear(tensor.op) or tape.is_backward(tensor.op):
            return None
        below = {source.name: self._holds(source, is_sum, known) for source in tensor.op.inputs}
        is_linear = gradient_graph.is_linear(tensor.op, lambda x: below.get(x.name) is not None)
        return any(below.values()) if is_linear else None


def _is_zero(tensor: tf.Tensor) -> bool:
    if not tensor.dtype.is_floating:
        return False
    while tensor.op.type in _PASSING:
        tensor = tensor.op.inputs[0]
    if tensor.op.type == "ZerosLike":
        return True
    return gradient_graph.is_zero(tensor.op.inputs[1] if tensor.op.type == "Fill" else tensor)
