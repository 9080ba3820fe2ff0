"""One set of traced functions per stage, which every microbatch calls: a step's graph has a stage's operations once.

A microbatch adds up to 6 calls to the graph.

    forward      inputs                      -> outputs, saved
    of_inputs    d outputs, saved            -> d inputs, passed on
    of_weights   d outputs, saved, passed on -> d weights, those of the last layers first, of whole buckets

The functions stay functions when the step runs (`_noinline`): there is one set of kernels, whatever m is
(docs/notes/performance.md). The backward is several functions, so that the stage's inputs have their gradients, which another
rank waits for, before the weights have theirs; and because a function holds what it takes until it has returned. Each function
reads the weights anew: weights are not among what is saved. At stage 3 it is given those that are gathered when it is called.
Where gathers pass behind products, the first microbatch's forward is several functions there, too: its first product would else
wait for the gathers of all layers.

Not every stage is a function of its inputs. As if this file were not there, each microbatch has operations of its own of a stage

* that gives `add_loss` something: the loss has the microbatch's weight,
* that writes statistics, or does anything else that counts how often it is traced; a loop may,
* that sends messages, each of which has a name of its own: of layers that look at all data ranks, for instance,
* with layers within it that are computed again in backward (`tfdist.recompute`, `keras.RematScope`), one after the other,
* whose layers may hand on parts of their outputs (`sharding.sharded_activations.may_hold_parts`): such layers send messages,
* that is computed again from an earlier state (`recompute=True` with dropout).

What a layer draws (dropout) is no obstacle: every call reads the generator's state and moves it on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, assign_buckets
from tfdist.collectives.program import NotOnTrialError
from tfdist.graphs import tape
from tfdist.pipeline.stages.masks import get_keras_mask, set_keras_mask
from tfdist.pipeline.stages.stage import StageLayer
from tfdist.sharding import host_lead
from tfdist.sharding.held_parameters import HeldParameters, Key
from tfdist.sharding.parameter_group import ParameterGroup
from tfdist.sharding.units import is_view

# How many functions compute the gradients of a stage's weights. With 1 the first rank's peak of memory under 1F1B is 10 % higher.
_FUNCTIONS_FOR_WEIGHTS = 4
# How many forward is at the most where gathers pass behind products: on a chain one gather does behind each.
_FUNCTIONS_BEHIND_GATHERS = 12


class StageFunctions:
    """The functions of one rank's stages, in one trace of a step; of its backward, too, if it is `training`.

    `bucket_bytes` is the size of the messages in which gradients are reduced: no function of the backward makes parts of two.
    """

    def __init__(
        self, program: RankProgram | None, weights: Sequence[Sequence[Any]], training: bool, bucket_bytes: int | None = None
    ):
        self._program = program
        self._weights = weights
        self._training = training
        self._bucket_bytes = bucket_bytes
        self._traced: dict[Any, _Functions | None] = {}
        self._called: set[int] = set()  # stages, for the first microbatch
        self._gathered: list[list[tf.Operation]] = []  # by the last run of the stage called last for the first time

    def call(
        self, stage: StageLayer, stage_inputs: Sequence[tf.Tensor], model_inputs: Sequence[Any], *, has_backward: bool
    ) -> StageCall | None:
        """Computes `stage` for one microbatch; None: the stage is no function of its inputs.

        `stage_inputs` bear their Keras masks; `has_backward` says whether the gradients of this call will be asked for.
        """
        if tf.executing_eagerly() or not all(isinstance(x, tf.Tensor) for x in (*stage_inputs, *model_inputs)):
            return None
        masks = [get_keras_mask(x) for x in stage_inputs]
        given = [*stage_inputs, *model_inputs, *masks]
        key = (stage.index, *(None if x is None else tf.TensorSpec(x.shape, x.dtype) for x in given))
        if key not in self._traced:
            self._traced[key] = self._functions_of(stage, stage_inputs, model_inputs, masks)
        functions = self._traced[key]
        if functions is None:
            return None
        held = None if self._program is None else self._held()
        waits_for_gathers = functions.weights and host_lead.is_limited(self._program) and stage.index not in self._called
        self._called.add(stage.index)
        forward = functions.forward_in_runs(has_backward) if waits_for_gathers else [functions.forward[has_backward]]
        call = StageCall(functions, [x for x in given if x is not None], forward, held)
        if waits_for_gathers:
            host_lead.gather_in_turn([*self._gathered, *(gathered for gathered, _ in call.runs)], self._program)
            if host_lead.is_on_chain(self._program):
                host_lead.queue_in_turn(call.runs, self._program)
            self._gathered = [gathered for gathered, _ in call.runs[-1:]]
        return call

    def _functions_of(
        self, stage: StageLayer, stage_inputs: Sequence[Any], model_inputs: Sequence[Any], masks: Sequence[Any]
    ) -> _Functions | None:
        """Traces the stage for tensors of these shapes and returns its functions; None: it is no function of its inputs."""
        specs = [tf.TensorSpec(x.shape, x.dtype) for x in (*stage_inputs, *model_inputs, *masks) if x is not None]
        found: list[_Trace] = []

        def compute(*given: tf.Tensor) -> None:
            waiting = iter(given)
            inputs = list(itertools.islice(waiting, len(stage_inputs)))
            inputs_of_model = list(itertools.islice(waiting, len(model_inputs)))
            for x, mask in zip(inputs, masks, strict=True):
                if mask is not None:
                    set_keras_mask(x, next(waiting))
            found.append(self._trace(stage, list(given), inputs, inputs_of_model))

        try:
            with contextlib.nullcontext() if self._program is None else self._program.on_trial():
                graph = tf.function(compute, autograph=False).get_concrete_function(*specs).graph
        except NotOnTrialError:
            return None
        keys = {} if self._program is None else self._held().names
        if not tape.can_be_called_again(graph, keys) or stage.added_losses():
            return None
        weights = {inside.name: keys[outside.name] for outside, inside in graph.captures if getattr(outside, "name", "") in keys}
        groups = {name: self._held().group_of(key) for name, key in weights.items()}
        return _Functions(graph, found[0], weights, groups, self._bucket_bytes)

    def _held(self) -> HeldParameters:
        return self._program.attachment(HeldParameters)

    def _trace(self, stage: StageLayer, given: list[Any], stage_inputs: list[Any], model_inputs: list[Any]) -> _Trace:
        with tf.GradientTape(watch_accessed_variables=self._training) as recorder:
            recorder.watch(floats(stage_inputs) if self._training else [])
            outputs = stage(stage_inputs, model_inputs, training=self._training)
        forward_count = tape.operations_so_far()
        is_last = stage.index == len(self._weights) - 1
        logits = [getattr(x, "_keras_logits", None) if is_last else None for x in outputs]
        upstream, of_inputs, of_weights = [], [], []
        if self._training:
            ends = floats([*outputs, *(x for x in logits if x is not None)])
            upstream = [tf.compat.v1.placeholder(x.dtype, x.shape) for x in ends]
            sources = floats(stage_inputs)
            gradients = recorder.gradient(ends, [*sources, *self._weights[stage.index]], output_gradients=upstream)
            of_inputs, of_weights = gradients[: len(sources)], gradients[len(sources) :]
        masks = [get_keras_mask(x) for x in outputs]
        return _Trace(given, outputs, masks, logits, upstream, of_inputs, of_weights, forward_count)


class StageCall:
    """A stage computed for one microbatch by the stage's functions; its `outputs` bear their Keras masks and logits.

    `runs` has, of each function of forward that is given weights, what these are made of, gathered, and the call.
    """

    def __init__(self, functions: _Functions, given: Sequence[tf.Tensor], forward: Sequence[_Part], held: HeldParameters | None):
        self._functions = functions
        self._held = held
        self._trace = trace = functions.trace
        # The microbatch's tensors by the names of those that stand for them in the trace.
        self._known = {x.name: value for x, value in zip(trace.given, given, strict=True)}
        self.runs: list[tuple[list[tf.Operation], list[tf.Operation]]] = []
        for part in forward:
            before = tape.operations_so_far()
            wholes = self._call(part)
            if wholes:
                calls = [one for one in tape.operations_since(before) if one.type in tape.CALLS]
                self.runs.append(([whole.op for whole in wholes], calls))
        self.outputs = [self._known[x.name] for x in trace.outputs]
        for x, mask in zip(self.outputs, trace.masks, strict=True):
            if mask is not None:
                set_keras_mask(x, self._known[mask.name])
        for x, logits in zip(self.outputs, trace.logits, strict=True):
            if logits is not None:
                x._keras_logits = self._known[logits.name]
        self.ends = ends_of(self.outputs)

    def _call(self, part: _Part) -> list[tf.Tensor]:
        """Calls one of the functions, with what is known and, of gathered parameters, what is held now; returns these."""
        weights = self._functions.weights
        wholes = {x.name: self._held.whole(weights[x.name]) for x in part.needs if x.name in weights}
        self._known.update(wholes)
        part.call(self._known)
        return list(wholes.values())

    def gradients_of_inputs(self, upstream: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        """Returns the gradients of the stage's floating inputs, from those of its `ends`."""
        self._known.update((x.name, value) for x, value in zip(self._trace.upstream, upstream, strict=True))
        self._call(self._functions.of_inputs)
        return [None if x is None else self._known[x.name] for x in self._trace.of_inputs]

    def gradients_of_weights(self) -> list[Any]:
        """Returns the gradients of the stage's weights. Call it after `gradients_of_inputs`."""
        for part in self._functions.of_weights:
            self._call(part)

        def value_of(x: tf.Tensor | None) -> tf.Tensor | None:
            # The shape of a table, whose gradient is rows: a result of a function would not be known when the step is traced.
            static = tf.get_static_value(x) if x is not None and x.dtype.is_integer else None
            return x if x is None else self._known[x.name] if static is None else tf.constant(static)

        return tf.nest.map_structure(value_of, self._trace.of_weights, expand_composites=True)


@dataclasses.dataclass(eq=False)
class _Trace:
    """The tensors of a stage's trace that matter outside it."""

    given: list[tf.Tensor]
    outputs: list[tf.Tensor]
    masks: list[tf.Tensor | None]
    logits: list[tf.Tensor | None]  # of which the model's outputs are the softmax or sigmoid: Keras's losses take them instead
    upstream: list[tf.Tensor]
    of_inputs: list[tf.Tensor | None]
    of_weights: list[Any]
    forward_count: int  # how many operations come before the first of the backward


class _Functions:
    """The functions of one stage, each a part of the stage's trace.

    `weights` are the gathered parameters that the trace captured: their keys by the names of what stands for them in it. A call
    is given those that are held when it is made. `groups` are what they are gathered with, by the same names.
    """

    def __init__(
        self,
        graph: tf.Graph,
        trace: _Trace,
        weights: Mapping[str, Key],
        groups: Mapping[str, ParameterGroup],
        bucket_bytes: int | None,
    ):
        self.trace = trace
        self.weights = weights
        operations = graph.get_operations()
        forward, backward = operations[: trace.forward_count], operations[trace.forward_count :]
        results = [*trace.outputs, *(x for x in (*trace.masks, *trace.logits) if x is not None)]
        parts = _Parts(graph, [*trace.given, *trace.upstream], groups)
        of_weights = [gradient for gradient in reversed(trace.of_weights) if gradient is not None]
        wanted = [[x for x in trace.of_inputs if x is not None], *_split(of_weights, _FUNCTIONS_FOR_WEIGHTS, bucket_bytes)]
        done: set[tf.Operation] = set()
        made = []  # by each function of the backward: the operations that no function before it has
        for tensors in wanted:
            made.append(tape.ancestors(tensors, backward, by_control=False) - done)
            done |= made[-1]
        needs = [parts.function(*pair).needs for pair in zip(made, wanted, strict=True)]
        passed_on = [[x for x in itertools.chain(*needs[place:]) if x.op in own] for place, own in enumerate(made)]
        self.of_inputs, *self.of_weights = (
            parts.function(own, [*tensors, *others]) for own, tensors, others in zip(made, wanted, passed_on, strict=True)
        )
        given = {*(x.name for x in (*trace.given, *trace.upstream)), *weights}
        saved = [x for x in itertools.chain(*needs) if x.op not in done and x.name not in given]
        writes = [operation for operation in forward if tape.writes(operation)]
        self._parts = parts
        self._of_forward = {
            has_backward: (tape.ancestors([*tensors, *writes], forward, by_control=False), tensors)
            for has_backward, tensors in ((False, results), (True, [*results, *saved]))
        }
        self.forward = {has_backward: parts.function(*pair) for has_backward, pair in self._of_forward.items()}

    def forward_in_runs(self, has_backward: bool) -> list[_Part]:
        """Returns functions that do what `forward` does, each when its own weights are there and the one before has returned.

        One alone where they would not wait for each other: what they draw at random, they draw in order.
        """
        operations, wanted = self._of_forward[has_backward]
        runs = self._parts.runs(operations, _FUNCTIONS_BEHIND_GATHERS)
        in_earlier = set().union(*runs[:-1])
        results = [[x for x in wanted if x.op in run] for run in runs[:-1]] + [[x for x in wanted if x.op not in in_earlier]]
        needs = [self._parts.function(*pair).needs for pair in zip(runs, results, strict=True)]
        passed_on = [[x for x in itertools.chain(*needs[place + 1 :]) if x.op in run] for place, run in enumerate(runs)]
        is_chain = all(any(x.op in run for x in later) for run, later in zip(runs, needs[1:], strict=False))
        if not (is_chain and results[-1]):
            return [self.forward[has_backward]]
        return [self._parts.function(run, [*own, *others]) for run, own, others in zip(runs, results, passed_on, strict=True)]


class _Parts:
    """Makes functions of parts of a graph, in which the tensors `given`, and those named `weights`, are what a call is given.

    `weights` has the group of parameters with which each is gathered.
    """

    def __init__(self, graph: tf.Graph, given: Iterable[tf.Tensor], weights: Mapping[str, ParameterGroup]):
        self._place = {operation: place for place, operation in enumerate(graph.get_operations())}
        self._given = {*(x.op for x in given), *(inside.op for _, inside in graph.captures if inside.name in weights)}
        self._weights = weights
        self._captured = {inside.name: outside for outside, inside in graph.captures if inside.name not in weights}

    def function(self, operations: Iterable[tf.Operation], results: Sequence[tf.Tensor]) -> _Part:
        """Returns the function that computes `results` by `operations` and, besides, by constants and reads of variables."""
        own = set(operations) - self._given
        needs: dict[str, tf.Tensor] = {}
        waiting = [x for operation in own for x in operation.inputs] + list(results)
        while waiting:
            x = waiting.pop()
            if x.op in own or x.name in self._captured:
                continue
            if tape.is_source(x.op) or is_view(x, self._weights):
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

    def runs(self, operations: Iterable[tf.Operation], count: int) -> list[set[tf.Operation]]:
        """Returns `operations` in at most `count` runs, one behind the other, each but the first beginning with a new gather."""
        ordered = sorted(set(operations) - self._given, key=self._place.__getitem__)  # what is given no run has to pass on
        first: dict[ParameterGroup, int] = {}  # by what is gathered together, the place of the first operation that reads it
        for place, operation in enumerate(ordered):
            for x in operation.inputs:
                if x.name in self._weights:
                    first.setdefault(self._weights[x.name], place)
        begins = sorted(set(first.values()))
        starts = sorted({begins[len(begins) * number // count] for number in range(1, count)} - {*begins[:1]}) if begins else []
        return [set(ordered[a:b]) for a, b in itertools.pairwise([0, *starts, len(ordered)]) if a < b]


class _Part:
    """A function of a part of a graph, which takes the tensors that it `needs`."""

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
        """Takes what the function needs from `known`, by name, and adds the function's results to `known`."""
        made = self._function(*(known[x.name] for x in self.needs)) if self._results else []
        known.update(zip((x.name for x in self._results), made, strict=True))


def _split(gradients: Sequence[Any], count: int, bucket_bytes: int | None) -> list[list[tf.Tensor]]:
    """Returns the tensors of `gradients` in at most `count` runs, one after the other, of about as many each.

    A run ends with a bucket of `bucket_bytes`, which can then leave, or lies within one.
    """
    sizes = [_bytes_of(gradient) for gradient in gradients]
    buckets = [list(range(len(gradients)))] if bucket_bytes is None else assign_buckets(sizes, bucket_bytes)
    if len(buckets) < count:  # the last ones are cut in more: what is sent before a step's end has less to pass behind
        pieces = [count * (place + 1) // len(buckets) - count * place // len(buckets) for place in range(len(buckets))]
        runs = [run for bucket, number in zip(buckets, sorted(pieces), strict=True) for run in _even_runs(bucket, number)]
    else:
        runs = [list(itertools.chain(*several)) for several in _even_runs(buckets, count)]
    return [tf.nest.flatten([gradients[place] for place in run], expand_composites=True) for run in runs]


def _even_runs(items: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Returns `items` in at most `count` runs of about as many, none empty."""
    bounds = [len(items) * place // count for place in range(count + 1)]
    return [items[start:stop] for start, stop in itertools.pairwise(bounds) if start < stop]


def _bytes_of(gradient: Any) -> int:
    """Returns the bytes in which `gradient` is sent, whole; 0: they are not known here."""
    is_rows = isinstance(gradient, tf.IndexedSlices)
    sizes = tf.get_static_value(gradient.dense_shape) if is_rows else gradient.shape
    if sizes is None or None in tuple(sizes):
        return 0
    return math.prod(map(int, sizes)) * gradient.dtype.size


def ends_of(outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns what gradients begin with: the outputs of a stage and, of the last one, the logits that they bear."""
    return floats([*outputs, *(x._keras_logits for x in outputs if getattr(x, "_keras_logits", None) is not None)])


def floats(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the floating ones of `tensors`: those that have gradients."""
    return [x for x in tensors if x.dtype.is_floating]
