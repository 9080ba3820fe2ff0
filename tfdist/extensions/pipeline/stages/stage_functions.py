"""One set of traced functions per stage, which every microbatch calls: a step's graph has a stage's operations once.

A microbatch adds up to 6 calls to the graph.

    forward      inputs                      -> outputs, saved
    of_inputs    d outputs, saved            -> d inputs, passed on
    of_weights   d outputs, saved, passed on -> d weights, those of the last layers first, of whole buckets

The functions stay functions when the step runs (`_noinline`): there is one set of kernels, whatever m is
(docs/notes/performance.md). The backward is several functions, so that the stage's inputs have their gradients, which another
rank waits for, before the weights have theirs; and because a function holds what it takes until it has returned. Each function
reads the weights anew: weights are not among what is saved. At stage 3 it is given those that are gathered when it is called.
Where gathers run beside products, the first microbatch's forward is several functions there, too: its first product would else
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

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import RankProgram, assign_buckets
from tfdist.collectives.buckets import in_parts
from tfdist.collectives.emission import NotOnTrialError
from tfdist.extensions.pipeline.parameter_cache import Key, ParameterCache
from tfdist.extensions.pipeline.stages.masks import get_keras_mask, set_keras_mask
from tfdist.extensions.pipeline.stages.stage import StageLayer, added_losses
from tfdist.graphs import tape
from tfdist.sharding.parameter_group import ParameterGroup
from tfdist.sharding.sharded_activations import may_hold_parts
from tfdist.sharding.units import is_view

# How many functions compute the gradients of a stage's weights. With 1 the first rank's peak of memory under 1F1B is 10 % higher.
_FUNCTIONS_FOR_WEIGHTS = 4
# How many forward is at the most where gathers run beside products: on a chain one gather does after each.
_FUNCTIONS_BEHIND_GATHERS = 12


class StageFunctions:
    """The functions of one rank's stages, in one trace of a step; of its backward, too, if it is `training`.

    `bucket_bytes` is the size of the messages in which gradients are reduced: no function of the backward makes parts of two.
    """

    def __init__(
        self, program: RankProgram | None, weights: Sequence[Sequence[Any]], training: bool, bucket_bytes: int | None = None
    ):
        self._program = program
        self._held = None if program is None else program.part(ParameterCache)
        self._weights = weights
        self._training = training
        self._bucket_bytes = bucket_bytes
        self._traced: dict[Any, _Functions | None] = {}
        self._called: set[int] = set()  # stages, for the first microbatch
        self._gathered: list[list[tf.Operation]] = []  # by the last run of the stage called last for the first time

    def call(
        self, stage: StageLayer, stage_inputs: Sequence[tf.Tensor], model_inputs: Sequence[Any], *, has_backward: bool
    ) -> "StageCall | None":
        """Computes `stage` for one microbatch; None: the stage is no function of its inputs.

        `stage_inputs` bear their Keras masks; `has_backward` says whether the gradients of this call will be asked for.
        """
        if tf.executing_eagerly() or may_hold_parts(self._program):
            return None
        if not all(isinstance(x, tf.Tensor) for x in (*stage_inputs, *model_inputs)):
            return None
        given = [[*stage_inputs], [*model_inputs], [get_keras_mask(x) for x in stage_inputs]]
        specs = tf.nest.map_structure(lambda x: None if x is None else tf.TensorSpec(x.shape, x.dtype), given)
        key = (stage.index, *tf.nest.flatten(specs))
        if key not in self._traced:
            self._traced[key] = self._functions_of(stage, specs)
        functions = self._traced[key]
        if functions is None:
            return None
        waits_for_gathers = functions.weights and self._program.order.is_limited and stage.index not in self._called
        self._called.add(stage.index)
        forward = functions.forward_in_runs(has_backward) if waits_for_gathers else [functions.forward[has_backward]]
        call = StageCall(functions, [x for x in tf.nest.flatten(given) if x is not None], forward)
        if waits_for_gathers:
            self._program.order.gather_units_in_order([*self._gathered, *(gathered for gathered, _ in call.runs)])
            if self._program.order.is_on_chain:
                self._program.order.queue_units_in_order(call.runs)
            self._gathered = [gathered for gathered, _ in call.runs[-1:]]
        return call

    def _functions_of(self, stage: StageLayer, specs: Sequence[Sequence[tf.TensorSpec | None]]) -> "_Functions | None":
        """Traces the stage for tensors of these shapes and returns its functions; None: it is no function of its inputs."""
        found: list[_Trace] = []

        def compute(stage_inputs: list[Any], model_inputs: list[Any], masks: list[Any]) -> None:
            for x, mask in zip(stage_inputs, masks, strict=True):
                if mask is not None:
                    set_keras_mask(x, mask)
            given = [x for x in (*stage_inputs, *model_inputs, *masks) if x is not None]
            found.append(self._trace(stage, given, stage_inputs, model_inputs))

        try:
            with contextlib.nullcontext() if self._program is None else self._program.on_trial():
                graph = tf.function(compute, autograph=False).get_concrete_function(*specs).graph
        except NotOnTrialError:
            return None
        keys = {} if self._held is None else self._held.names
        if not tape.can_be_called_again(graph, keys) or added_losses(stage):
            return None
        weights = {inside.name: keys[outside.name] for outside, inside in graph.captures if getattr(outside, "name", "") in keys}
        return _Functions(graph, found[0], weights, self._held, self._bucket_bytes)

    def _trace(self, stage: StageLayer, given: list[Any], stage_inputs: list[Any], model_inputs: list[Any]) -> "_Trace":
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
            sources = floats(stage_inputs), self._weights[stage.index]
            of_inputs, of_weights = recorder.gradient(ends, sources, output_gradients=upstream)
        masks = [get_keras_mask(x) for x in outputs]
        return _Trace(given, outputs, masks, logits, upstream, of_inputs, of_weights, forward_count)


class StageCall:
    """A stage computed for one microbatch by the stage's functions; its `outputs` bear their Keras masks and logits.

    `runs` has, of each function of forward that is given weights, what these are made of, gathered, and the call.
    """

    def __init__(self, functions: "_Functions", given: Sequence[tf.Tensor], forward: Sequence["_Part"]):
        self._functions = functions
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
        for x, mask, logits in zip(self.outputs, trace.masks, trace.logits, strict=True):
            if mask is not None:
                set_keras_mask(x, self._known[mask.name])
            if logits is not None:
                x._keras_logits = self._known[logits.name]
        self.ends = ends_of(self.outputs)

    def _call(self, part: "_Part") -> list[tf.Tensor]:
        """Calls one of the functions, with what is known and, of gathered parameters, what is held now; returns these."""
        weights, held = self._functions.weights, self._functions.held
        wholes = {x.name: held.whole(weights[x.name]) for x in part.needs if x.name in weights}
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
    is given those that are `held` when it is made.
    """

    def __init__(
        self,
        graph: tf.Graph,
        trace: _Trace,
        weights: Mapping[str, Key],
        held: ParameterCache | None,
        bucket_bytes: int | None,
    ):
        self.trace = trace
        self.weights = weights
        self.held = held
        operations = graph.get_operations()
        forward, backward = operations[: trace.forward_count], operations[trace.forward_count :]
        self._place = {operation: place for place, operation in enumerate(operations)}
        stand_ins = {inside.op for _, inside in graph.captures if inside.name in weights}
        self._given = {*(x.op for x in (*trace.given, *trace.upstream)), *stand_ins}
        self._captured = {inside.name: outside for outside, inside in graph.captures if inside.name not in weights}
        of_weights = [gradient for gradient in reversed(trace.of_weights) if gradient is not None]
        wanted = [[x for x in trace.of_inputs if x is not None], *_split(of_weights, _FUNCTIONS_FOR_WEIGHTS, bucket_bytes)]
        done: set[tf.Operation] = set()
        made = []  # by each function of the backward: the operations that no function before it has
        for tensors in wanted:
            made.append(tape.ancestors(tensors, backward, by_control=False) - done)
            done |= made[-1]
        self.of_inputs, *self.of_weights = parts = self._in_turn(made, wanted)
        results = [*trace.outputs, *(x for x in (*trace.masks, *trace.logits) if x is not None)]
        saved = [x for part in parts for x in part.needs if x.op not in done | self._given]
        writes = [operation for operation in forward if tape.writes(operation)]
        self._of_forward = {
            has_backward: (tape.ancestors([*tensors, *writes], forward, by_control=False), tensors)
            for has_backward, tensors in ((False, results), (True, [*results, *saved]))
        }
        self.forward = {has_backward: self._function(*pair) for has_backward, pair in self._of_forward.items()}

    def forward_in_runs(self, has_backward: bool) -> list["_Part"]:
        """Returns functions that do what `forward` does, each when its own weights are there and the one before has returned.

        One alone where they would not wait for each other: what they draw at random, they draw in order.
        """
        operations, wanted = self._of_forward[has_backward]
        runs = self._runs(operations, _FUNCTIONS_BEHIND_GATHERS)
        in_earlier = set().union(*runs[:-1])
        results = [[x for x in wanted if x.op in run] for run in runs[:-1]] + [[x for x in wanted if x.op not in in_earlier]]
        parts = self._in_turn(runs, results)
        is_chain = all(any(x.op in run for x in later.needs) for run, later in zip(runs, parts[1:], strict=False))
        return parts if is_chain and results[-1] else [self.forward[has_backward]]

    def _in_turn(self, runs: Sequence[set[tf.Operation]], results: Sequence[Sequence[tf.Tensor]]) -> list["_Part"]:
        """Returns the functions of `runs` of operations: each returns its `results`, and what later ones need of it."""
        needs = [self._function(*pair).needs for pair in zip(runs, results, strict=True)]
        passed_on = [[x for x in itertools.chain(*needs) if x.op in run] for run in runs]
        return [self._function(run, [*own, *others]) for run, own, others in zip(runs, results, passed_on, strict=True)]

    def _function(self, operations: Iterable[tf.Operation], results: Sequence[tf.Tensor]) -> "_Part":
        """Returns the function that computes `results` by `operations` and, besides, by constants and reads of variables."""
        own = set(operations) - self._given
        needs: dict[str, tf.Tensor] = {}
        waiting = [x for operation in own for x in operation.inputs] + list(results)
        while waiting:
            x = waiting.pop()
            if x.op in own or x.name in self._captured:
                continue
            if tape.is_source(x.op) or is_view(x, self.weights):
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

    def _runs(self, operations: Iterable[tf.Operation], count: int) -> list[set[tf.Operation]]:
        """Returns `operations` in at most `count` consecutive runs, each but the first beginning with a new gather."""
        ordered = sorted(set(operations) - self._given, key=self._place.__getitem__)  # what is given no run has to pass on
        first: dict[ParameterGroup, int] = {}  # by what is gathered together, the place of the first operation that reads it
        for place, operation in enumerate(ordered):
            for x in operation.inputs:
                if x.name in self.weights:
                    first.setdefault(self.held.group_of(self.weights[x.name]), place)
        starts = [begins[0] for begins in in_parts(sorted(set(first.values())), count)[1:]]
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
    sizes = [(x.shape.num_elements() or 0) * x.dtype.size for x in gradients]  # as they are sent, whole; 0: not known here
    is_one = bucket_bytes is None or not gradients
    buckets = [list(range(len(gradients)))] if is_one else assign_buckets(sizes, bucket_bytes)
    if len(buckets) < count:  # the last ones are cut in more: what is sent before a step's end has less to run beside
        pieces = sorted(map(len, in_parts(range(count), len(buckets))))
        runs = [run for bucket, number in zip(buckets, pieces, strict=True) for run in in_parts(bucket, number)]
    else:
        runs = [list(itertools.chain(*several)) for several in in_parts(buckets, count)]
    return [tf.nest.flatten([gradients[place] for place in run], expand_composites=True) for run in runs]


def ends_of(outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns what gradients begin with: the outputs of a stage and, of the last one, the logits that they bear."""
    return floats([*outputs, *(x._keras_logits for x in outputs if getattr(x, "_keras_logits", None) is not None)])


def floats(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the floating ones of `tensors`: those that have gradients."""
    return [x for x in tensors if x.dtype.is_floating]
