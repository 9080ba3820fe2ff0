"""A warning, once, of eager steps that read a gradient of their own rows as if it were that of the batch.

    tf.linalg.global_norm(grads)       squares a summand (stages 0 to 2): told
    grads[0] / 4, acc.assign_add(g)    linear: as good on a summand
    optimizer.apply(grads, weights)    sums them itself

    tf.matmul(x, of_rows, transpose_a=True)    made by hand of gradients of rows (every stage): a summand, too

A traced step has a graph, in which what reads a gradient so is made to read the sum: see `tape_gradients`. An eager operation has
run when it is seen.
"""

from __future__ import annotations

import collections
import contextlib
import types
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.collectives import RankProgram
from tfdist.graphs import tape
from tfdist.optimizers.eager_rows import EagerRows
from tfdist.sharding import gradient_graph

_told: weakref.WeakSet[Any] = weakref.WeakSet()
_OF_THE_SHAPE = frozenset("CheckNumerics OnesLike Rank Shape ShapeN Size ZerosLike".split())
_SUMS = frozenset("Add AddV2 BiasAdd Sub".split())
_WRITES = frozenset("AssignAddVariableOp AssignSubVariableOp AssignVariableOp".split())


class EagerReads:
    """The gradients of one rank of an eager run; an attachment of the rank's program."""

    def __init__(self, program: RankProgram):
        self._known: dict[int, Any] = {}  # gradients, and what is linear in them, by id; kept, so that ids stay their own
        self._values: collections.deque[Any] = collections.deque(maxlen=64)  # of variables, read last
        self._sums: dict[int, Any] = {}  # sums over rows of gradients of rows, and what is linear in them
        self._rows = EagerRows(program)
        self._parameters: set[int] = set()
        self._is_own = False
        self._strategy = tf.distribute.get_strategy()
        self._program = program
        self._is_watching = False

    def note(self, grads: Sequence[Any], handles: Sequence[tf.Tensor]) -> None:
        """Notes what a tape has returned for the parameters of `handles`."""
        self._watch()
        self._known.update((id(part), part) for grad in grads for part in tf.nest.flatten(grad, expand_composites=True))
        self._parameters.update(map(id, handles))

    def note_of_rows(self, grads: Sequence[tf.Tensor]) -> None:
        """Notes what a tape has returned for rows, of which gradients of parameters may be made."""
        self._watch()
        self._rows.note(grads)

    def _watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            seen = contextlib.ExitStack()
            seen.enter_context(tape.each_operation_seen_by(self._see))
            self._program.at_close.append(lambda _: seen.close())

    def knows(self, grad: Any) -> bool:
        """Whether `grad` is a gradient of a parameter, or linear in such."""
        return all(id(part) in self._known for part in tf.nest.flatten(grad, expand_composites=True))

    @contextlib.contextmanager
    def own_use(self) -> Iterator[None]:
        """A block of operations that are not the user's: an optimizer's."""
        before, self._is_own = self._is_own, True
        try:
            yield
        finally:
            self._is_own = before

    def _see(self, kind: str, inputs: Sequence[Any], attributes: Sequence[Any], outputs: Sequence[Any]) -> None:
        if self._is_own:
            return
        if kind == "ReadVariableOp" and id(inputs[0]) not in self._parameters:
            self._values.extend(outputs)
        is_of_sums = any(id(x) in self._sums for x in inputs)
        with self.own_use():  # which looks at numbers
            made = self._rows.follow(kind, inputs, attributes, outputs)
            is_of_rows = is_of_sums or any(map(self._rows.is_of_rows, inputs))
            is_average = made is None and is_of_rows and self._rows.may_average(kind, inputs)
        if made is not None:
            (self._known if made == "Mean" else self._sums).update((id(output), output) for output in outputs)
            return
        if is_average:
            self._tell(kind, is_made_by_hand=True)
        gradients = self._sums if is_of_sums else self._known
        found = [id(x) in gradients for x in inputs]
        is_of_merge_call = kind == "AddN" and not all(found)  # which adds up what several ranks have
        if not any(found) or kind in _OF_THE_SHAPE or is_of_merge_call:
            return
        operation: Any = types.SimpleNamespace(type=kind, inputs=list(inputs))
        if kind in _WRITES:
            is_linear = id(inputs[0]) not in self._parameters
        elif kind in _SUMS and sum(found) == 1:  # what is added to a variable, and will be written
            is_linear = any(value is x for x in inputs for value in self._values)
        else:
            is_linear = kind == "IdentityN" or gradient_graph.is_linear(operation, lambda x: id(x) in gradients)
        if is_linear:
            gradients.update((id(output), output) for output in outputs)
        else:
            self._tell(kind, is_of_sums)

    def _tell(self, kind: str, is_made_by_hand: bool) -> None:
        if self._strategy not in _told:
            _told.add(self._strategy)
            _warn(kind, is_made_by_hand)


def _warn(kind: str, is_made_by_hand: bool) -> None:
    what = "A gradient that was made by hand, of gradients of rows," if is_made_by_hand else "A gradient"
    warnings.warn(
        errors.message(
            f"{what} is read by `{kind}` in an eager run: it is of the device's own rows there, where one device has that of the "
            "whole batch.",
            fix="`tfdist.global_norm(gradients, variables)` and `tfdist.clip_by_global_norm(gradients, variables, norm)` are of "
            "the whole batch, and so are the optimizer's `global_clipnorm` and `weight_decay`; or put `@tf.function` around "
            "`strategy.run`, or compile without `run_eagerly`, where whatever reads a gradient reads that of the whole batch.",
        ),
        stacklevel=5,
    )
