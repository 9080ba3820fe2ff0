"""Which layers of a model can be sharded, and what their outputs go through on the way to the next.

The model is called on symbols (`keras_tracing`), with and without `training`, since the two may differ in what they compute.
"""

import dataclasses
import functools
from collections.abc import Sequence

import keras

from tfdist import errors
from tfdist.extensions.tensor.elementwise import is_elementwise_activation
from tfdist.extensions.tensor.plans import keras_tracing
from tfdist.extensions.tensor.plans.keras_tracing import Trace
from tfdist.extensions.tensor.plans.layer_kinds import LOOPS, LayerKind, is_attention, kind_of, obstacle, path_of
from tfdist.extensions.tensor.plans.layer_uses import LayerUse, hidden_use, seen_use
from tfdist.extensions.tensor.plans.model_inputs import symbolic_calls
from tfdist.sharding import layers_within


@dataclasses.dataclass(frozen=True, eq=False)
class ShardableLayer:
    """A layer that can be sharded, and how the model calls it.

    Attributes:
        layer: the Keras layer.
        path: its path, such as "encoder/mlp/dense_1"; its name if Keras gave it none.
        kind: its kind.
        uses: every call of a training step.
        is_traced: False if a call was hidden in something that cannot be followed, or none was seen: then nothing is
            known of what follows it.
        obstacle: why it cannot be sharded, None if it can.
    """

    layer: keras.Layer
    path: str
    kind: LayerKind
    uses: tuple[LayerUse, ...]
    is_traced: bool
    obstacle: str | None

    @functools.cached_property
    def keeps_local_output(self) -> bool:
        """Whether its output may stay local at all: what is applied within the layer must be elementwise too."""
        return (
            self.is_traced
            and not self.kind.is_attention
            and self.layer.activity_regularizer is None
            and is_elementwise_activation(getattr(self.layer, "activation", None))
        )


@dataclasses.dataclass(frozen=True, eq=False)
class ModelGraph:
    """The layers of a model that can be sharded, and the steps between them.

    Attributes:
        layers: in the order in which the model calls them.
        traces: what a call did, with training and without.
        notes: what could not be followed and what was assumed, a sentence each.
    """

    layers: tuple[ShardableLayer, ...]
    traces: tuple[Trace, ...]
    notes: tuple[str, ...]


def trace_model(model: keras.Model) -> ModelGraph:
    """Finds the layers of a built model that can be sharded, those nested in other layers too, and follows their outputs.

    Layers within a part that cannot be followed have `is_traced=False`, and a note says why.

    Raises:
        ValueError: `model` is not a Keras model, or not built.
    """
    if not isinstance(model, keras.Model):
        raise errors.value_error("`model` must be a `keras.Model`.", model=model)
    leaves, loops = _shardable(model)
    if not model.built or not all(layer.built for layer in leaves):
        raise errors.value_error(
            "`model` must be built: the sizes of its layers and inputs decide how it is sharded.",
            model=model.name,
            fix="Call it on a batch first, or use `model.build(input_shape)`.",
        )
    calls = list(symbolic_calls(model))
    best: list[Trace] = []
    notes: list[str] = [] if calls else [f"{path_of(model)} does not know the shapes of its inputs: no layer is paired."]
    for inputs, size in calls:
        try:
            traces = [keras_tracing.trace(model, leaves, inputs, training=training) for training in (True, False)]
        except Exception as error:  # whatever a user's code raises
            failure = f"{path_of(model)} cannot be called on symbols ({keras_tracing.first_line(error)}): no layer is paired."
            notes = notes or [failure]
            continue
        if not best or _opaque(traces) < _opaque(best):
            best = traces
            notes = [f"Sizes that the model leaves open, such as a sequence's length, count as {size}."] if size else []
        if not _opaque(best):
            break
    for layer, reason in dict(pair for trace in best for pair in trace.opaque).items():
        notes.append(f"{path_of(layer)} cannot be followed ({reason}): the layers in it are not paired.")
    layers = (_describe(layer, layer in loops, best) for layer in _in_order_of_calls(leaves, best))
    return ModelGraph(tuple(layers), tuple(best), tuple(notes))


def _opaque(traces: Sequence[Trace]) -> int:
    return sum(len(trace.opaque) for trace in traces)


def _shardable(model: keras.Model) -> tuple[list[keras.Layer], set[keras.Layer]]:
    """Returns the layers that can be sharded, and those of them that stand in a layer that calls them in a loop."""
    layers = layers_within(model)
    within = {inner for layer in layers if is_attention(layer) for inner in layers_within(layer)[1:]}
    looped = {inner for layer in layers if isinstance(layer, LOOPS) for inner in layers_within(layer)[1:]}
    leaves = [layer for layer in layers if kind_of(layer) and layer not in within]
    return leaves, looped.intersection(leaves)


def _in_order_of_calls(leaves: Sequence[keras.Layer], traces: Sequence[Trace]) -> list[keras.Layer]:
    order = dict.fromkeys(event.operation for trace in traces for event in trace.events if event.operation in set(leaves))
    order |= dict.fromkeys(layer for trace in traces for layer in trace.hidden)
    return list(order | dict.fromkeys(leaves))


def _describe(layer: keras.Layer, is_in_loop: bool, traces: Sequence[Trace]) -> ShardableLayer:
    kind = kind_of(layer)
    calls = [[event for event in trace.events if event.operation is layer] for trace in traces]
    hidden = [trace for trace in traces if layer in trace.hidden]
    seen = next(((events, trace) for events, trace in zip(calls, traces, strict=True) if events), None)
    uses: tuple[LayerUse, ...] = ()
    if seen is not None:
        uses = tuple(seen_use(event, seen[1]) for event in seen[0])
    elif hidden and any(hidden[0].hidden[layer][:1]):
        uses = (hidden_use(layer, hidden[0]),)
    reason = obstacle(layer)
    if is_in_loop:
        reason = "the layer around it runs it in a loop or replaces its weights"
    elif any(layer in trace.foreign_reads for trace in traces):
        reason = "its weights are used outside of its calls too"
    elif kind.is_attention and not kind.returns_more and any(len(event.outputs) > 1 for events in calls for event in events):
        reason = "it returns its attention scores"
    return ShardableLayer(layer, path_of(layer), kind, uses, is_traced=any(calls) and not hidden, obstacle=reason)
