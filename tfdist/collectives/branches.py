"""Collectives in a branch of `tf.cond`: all ranks of a group must take the same, or some wait for ever.

Whether they do shows from what the predicate is computed from. A variable that all ranks hold alike (a count of steps) and what a
collective has returned are the same on all ranks; the rank's own examples are not. It is looked at when the rank's function has
been traced, since there is no operation for the branch before.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist import errors
from tfdist.collectives.program import RankProgram
from tfdist.collectives.where import is_branch

_READ_DATA = ("IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue", "OptionalHasValue", "IteratorGetNextAsOptional")


class Branches:
    """The branches of one rank's program, in one trace, in which collectives are emitted; an attachment of the program."""

    def __init__(self, program: RankProgram):
        self._program = program
        self._names: dict[str, str] = {}  # of the functions of outermost branches: what stands in them
        if program.mesh.data_parallel_size > 1:
            program.at_close.append(lambda _: self._check())

    def enter(self, what: str) -> bool:
        """Notes that `what` is to be emitted here; returns whether it may be: nothing but branches stands around it."""
        graph, outermost = tf.compat.v1.get_default_graph(), None
        while is_branch(graph):
            graph, outermost = graph.outer_graph, graph
        if graph is not self._program.graph:
            return False
        if outermost is not None and not self._program.is_own_branch(outermost):
            self._names[outermost.name] = what
        return True

    def _check(self) -> None:
        for operation in self._program.graph.get_operations() if self._names else ():
            if operation.type not in ("If", "StatelessIf", "Case", "StatelessCase"):
                continue
            found = [self._names[name] for name in _functions_of(operation) if name in self._names]
            if found and self._is_of_examples(operation.inputs[0]):
                raise errors.runtime_error(
                    f"{found[0]} stands in a branch (`tf.cond`, or an `if` on a tensor) that each rank chooses by its own "
                    "examples: ranks that choose differently would wait for each other for ever.",
                    predicate=operation.inputs[0].name,
                    fix="Let all ranks decide alike: on a variable, on gradients of weights, or on the sum of what they have, "
                    '`tfdist.collectives.all_reduce(x, "data")`.',
                )

    def _is_of_examples(self, predicate: tf.Tensor) -> bool:
        program = self._program
        leaves = tf.nest.flatten(program.arguments, expand_composites=True)
        examples = {leaf.name for leaf in leaves if tf.is_symbolic_tensor(leaf) and leaf.graph is program.graph}
        on_chain = {operation.name for operation in program.graph.capture(program.token()).consumers()}
        waiting, seen = [predicate], set()
        while waiting:
            tensor = waiting.pop()
            if tensor.name in examples or tensor.op.type in _READ_DATA:
                return True
            if tensor.op.name not in seen and tensor.op.name not in on_chain:
                seen.add(tensor.op.name)
                waiting.extend(tensor.op.inputs)
        return False


def _functions_of(operation: tf.Operation) -> list[str]:
    if operation.type in ("Case", "StatelessCase"):
        return [function.name for function in operation.get_attr("branches")]
    return [operation.get_attr(f"{branch}_branch").name for branch in ("then", "else")]
