"""One set of traced functions per stage, which every microbatch calls: a step's graph has a stage's operations once.

    traced per microbatch     m x (operations of the forward and of the backward)
    here                      1 x those, and up to 6 m calls

    forward      arrived, inputs            -> left, saved
    of_input     d left, saved              -> d arrived, passed on
    of_weights   d left, saved, passed on   -> d weights, those of the last layers first

They stay functions when the step runs (`_noinline`): there is one set of kernels, whatever m is (docs/notes/performance.md). The
backward is several, so that what arrived has its gradient, which another rank waits for, before the weights have theirs; and
because a function holds what it takes until it has returned. Weights are read anew in each function, not saved.

Not every stage is a function of what arrives. Traced anew for each microbatch, as if this file were not there, is a stage

* that gives `add_loss` something: its weight is the microbatch's,
* that writes statistics, or does anything else that counts how often it is traced; a loop may,
* that sends messages, each of which has a name of its own: with a tensor axis, or of layers that look at all data ranks,
* that is computed again from a state that has moved on (`recompute=True` with dropout).

What a layer draws (dropout) is no obstacle: the generator's state is read and moved on in every call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.collectives.program import CollectiveOnTrialError
from tfdist.pipeline.masks import get_keras_mask, set_keras_mask
from tfdist.pipeline.stages.stage import StageLayer
from tfdist.sharding import tape

# What the gradients of a stage's weights are cut in. With 1 the first rank's peak of a step under 1F1B is a tenth higher.
_FUNCTIONS_FOR_WEIGHTS = 4


class StageFunctions:
    """The functions of one rank's stages, in one trace of a step.

    Args:
        program: the rank's program; None: one device runs all stages.
        weights: per stage, the variables whose gradients are wanted.
        training: what the layers are called with; whether there is a backward.
    """

    def __init__(self, program: RankProgram | None, weights: Sequence[Sequence[Any]], training: bool):
        self._program = program
        self._weights = weights
        self._training = training
        self._traced: dict[tuple, _Functions | None] = {}

    def call(
        self, stage: StageLayer, arrived: Sequence[tf.Tensor], inputs: Sequence[Any], *, has_backward: bool
    ) -> StageCall | None:
        """Computes `stage` for one microbatch; None if it is no function of what arrives.

        Args:
            stage: the stage.
            arrived: what the stage before has sent, with its masks.
            inputs: the model's inputs, flat.
            has_backward: whether the gradients of this call will be asked for.
        """
        if tf.executing_eagerly() or not all(isinstance(x, tf.Tensor) for x in (*arrived, *inputs)):
            return None
        masks = [get_keras_mask(x) for x in arrived]
        given = [*arrived, *inputs, *masks]
        key = (stage.index, *(None if x is None else tf.TensorSpec(x.shape, x.dtype) for x in given))
        if key not in self._traced:
            self._traced[key] = self._functions_of(stage, arrived, inputs, masks)
        functions = self._traced[key]
        return None if functions is None else StageCall(functions, [x for x in given if x is not None], has_backward)

    def _functions_of(
        self, stage: StageLayer, arrived: Sequence[Any], inputs: Sequence[Any], masks: Sequence[Any]
    ) -> _Functions | None:
        specs = [tf.TensorSpec(x.shape, x.dtype) for x in (*arrived, *inputs, *masks) if x is not None]
        found: list[_Trace] = []

        def compute(*flat: tf.Tensor) -> None:
            arriving, given = list(flat[: len(arrived)]), list(flat[len(arrived) : len(arrived) + len(inputs)])
            given_masks = iter(flat[len(arrived) + len(inputs) :])
            for x, mask in zip(arriving, masks, strict=True):
                if mask is not None:
                    set_keras_mask(x, next(given_masks))
            found.append(self._trace(stage, list(flat), arriving, given))

        try:
            with contextlib.nullcontext() if self._program is None else self._program.on_trial():
                graph = tf.function(compute, autograph=False).get_concrete_function(*specs).graph
        except CollectiveOnTrialError:
            return None
        if not tape.can_be_called_again(graph) or stage.added_losses():
            return None
        return _Functions(graph, found[0])

    def _trace(self, stage: StageLayer, given: list[Any], arriving: list[Any], inputs: list[Any]) -> _Trace:
        with tf.GradientTape() as recorder:
            recorder.watch(floats(arriving))
            left = stage(arriving, inputs, training=self._training)
        count = tape.operations_so_far()
        upstream, back, of_weights = [], [], []
        if self._training:
            upstream = [tf.compat.v1.placeholder(x.dtype, x.shape) for x in floats(left)]
            sources = floats(arriving)
            gradients = recorder.gradient(floats(left), [*sources, *self._weights[stage.index]], output_gradients=upstream)
            back, of_weights = gradients[: len(sources)], gradients[len(sources) :]
        return _Trace(given, left, [get_keras_mask(x) for x in left], upstream, back, of_weights, count)


class StageCall:
    """A stage computed for one microbatch.

    Attributes:
        left: what leaves it, with its masks.
    """

    def __init__(self, functions: _Functions, given: Sequence[tf.Tensor], has_backward: bool):
        self._functions = functions
        self._known = dict(zip(functions.names_of_given, given, strict=True))
        self.left = functions.forward(self._known, has_backward)

    def gradients_of_input(self, upstream: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        """Returns the gradients of those that arrived and are floating, from those of what left."""
        self._known.update(zip(self._functions.names_of_upstream, upstream, strict=True))
        return self._functions.of_input(self._known)

    def gradients_of_weights(self) -> list[Any]:
        """Returns the gradients of the weights; after `gradients_of_input`."""
        return self._functions.of_weights(self._known)


@dataclasses.dataclass(eq=False)
class _Trace:
    """What the trace of a stage has found: tensors of its graph."""

    given: list[tf.Tensor]
    left: list[tf.Tensor]
    masks: list[tf.Tensor | None]
    upstream: list[tf.Tensor]
    back: list[tf.Tensor | None]
    of_weights: list[Any]
    forward_count: int  # operations before the first of the backward


class _Functions:
    """The functions of one stage, made of its trace.

    Each takes, and adds what it makes, to a dictionary of a microbatch's tensors by their names in the trace.
    """

    def __init__(self, graph: tf.Graph, trace: _Trace):
        self._trace = trace
        self.names_of_given = [x.name for x in trace.given]
        self.names_of_upstream = [x.name for x in trace.upstream]
        operations = graph.get_operations()
        forward, backward = operations[: trace.forward_count], operations[trace.forward_count :]
        results = [*trace.left, *(mask for mask in trace.masks if mask is not None)]
        part = _Parts(graph, [*trace.given, *trace.upstream])
        of_weights = [gradient for gradient in reversed(trace.of_weights) if gradient is not None]
        wanted = [[x for x in trace.back if x is not None], *map(_flat, _cut(of_weights, _FUNCTIONS_FOR_WEIGHTS))]
        done: set[tf.Operation] = set()
        made = []
        for tensors in wanted:
            made.append(tape.ancestors(tensors, backward, by_control=False) - done)
            done |= made[-1]
        needs = [part.function(*pair).needs for pair in zip(made, wanted, strict=True)]
        passed_on = [[x for x in itertools.chain(*needs[place:]) if x.op in own] for place, own in enumerate(made)]
        self._of_input, *self._of_weights = (
            part.function(own, [*tensors, *others]) for own, tensors, others in zip(made, wanted, passed_on, strict=True)
        )
        known = {*self.names_of_given, *self.names_of_upstream}
        saved = [x for x in itertools.chain(*needs) if x.op not in done and x.name not in known]
        writes = [operation for operation in forward if tape.writes(operation)]
        self._forward = {
            has_backward: part.function(tape.ancestors([*tensors, *writes], forward, by_control=False), tensors)
            for has_backward, tensors in ((False, results), (True, [*results, *saved]))
        }

    def forward(self, known: dict[str, tf.Tensor], has_backward: bool) -> list[tf.Tensor]:
        self._forward[has_backward].call(known)
        left = [known[x.name] for x in self._trace.left]
        for x, mask in zip(left, self._trace.masks, strict=True):
            if mask is not None:
                set_keras_mask(x, known[mask.name])
        return left

    def of_input(self, known: dict[str, tf.Tensor]) -> list[tf.Tensor | None]:
        self._of_input.call(known)
        return [None if x is None else known[x.name] for x in self._trace.back]

    def of_weights(self, known: dict[str, tf.Tensor]) -> list[Any]:
        for part in self._of_weights:
            part.call(known)

        def outside(x: tf.Tensor | None) -> tf.Tensor | None:
            # The shape of a table, whose gradient is rows: a result of a function would not be known when the step is traced.
            value = tf.get_static_value(x) if x is not None and x.dtype.is_integer else None
            return x if x is None else known[x.name] if value is None else tf.constant(value)

        return tf.nest.map_structure(outside, self._trace.of_weights, expand_composites=True)


class _Parts:
    """Makes functions of parts of a graph.

    Args:
        graph: the graph.
        given: tensors of it that stand for what is given.
    """

    def __init__(self, graph: tf.Graph, given: Iterable[tf.Tensor]):
        self._place = {operation: place for place, operation in enumerate(graph.get_operations())}
        self._given = {x.op for x in given}
        self._captured = {inside.name: outside for outside, inside in graph.captures}

    def function(self, operations: Iterable[tf.Operation], results: Sequence[tf.Tensor]) -> _Part:
        """Returns the function that computes `results` by `operations` and, besides, reads of variables and constants."""
        own = set(operations) - self._given
        needs: dict[str, tf.Tensor] = {}
        waiting = [x for operation in own for x in operation.inputs] + list(results)
        while waiting:
            x = waiting.pop()
            if x.op in own or x.name in self._captured:
                continue
            if tape.is_source(x.op):
                own.add(x.op)
                waiting.extend(x.op.inputs)
            else:
                needs[x.name] = x
        copied = [operation for operation in own if not any(x.name in self._captured for x in operation.outputs)]
        return _Part(
            sorted(copied, key=self._place.__getitem__),
            sorted(needs.values(), key=lambda x: (self._place[x.op], x.value_index)),
            list({x.name: x for x in results}.values()),
            self._captured,
        )


class _Part:
    """A function of a part of a graph.

    Attributes:
        needs: tensors of the graph that it takes.
    """

    def __init__(
        self,
        operations: Sequence[tf.Operation],
        needs: list[tf.Tensor],
        results: list[tf.Tensor],
        captured: dict[str, tf.Tensor],
    ):
        self.needs = needs
        self._results = results

        def compute(*given: tf.Tensor) -> list[tf.Tensor]:
            known = {**captured, **dict(zip((x.name for x in needs), given, strict=True))}
            tape.copy_all(operations, known)
            return [known[x.name] for x in results]

        self._function: Callable[..., Any] = tf.function(compute, autograph=False, experimental_attributes={"_noinline": True})

    def call(self, known: dict[str, tf.Tensor]) -> None:
        """Takes what it needs from `known`, and adds its results."""
        made = self._function(*(known[x.name] for x in self.needs)) if self._results else []
        known.update(zip((x.name for x in self._results), made, strict=True))


def _flat(gradients: Sequence[Any]) -> list[tf.Tensor]:
    return tf.nest.flatten(gradients, expand_composites=True)


def _cut(gradients: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Returns at most `count` parts, one after the other, of about as many each."""
    bounds = [len(gradients) * place // count for place in range(count + 1)]
    return [gradients[start:stop] for start, stop in itertools.pairwise(bounds) if start < stop]


def floats(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Returns those of `tensors` that have gradients."""
    return [x for x in tensors if x.dtype.is_floating]
