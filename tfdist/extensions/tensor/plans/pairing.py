"""Which layers hand their sharded output straight to the next: no gather between them, no scatter of the input.

    whole X ──► column A ──► local Y_i ──► elementwise ──► row B ──► sum over the ranks: whole Z

An output may stay local if all that is ever done with it is elementwise, with other outputs that are local in the same way,
until it enters layers sharded by row. One use that needs the whole output (a residual, a softmax, a norm, the model's own output)
and it is gathered, for all its uses. Layers may stand between that treat each channel by itself:

    conv, column ── BatchNormalization ── relu ── pooling ── conv, row

Pooling and padding do as they did before. A normalization has weights, a number for each channel: it is sharded with the channels
that it gets, in the role "column", and cannot be sharded anywhere else.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import keras

from tfdist.extensions.tensor.plans.keras_tracing import Event, Trace
from tfdist.extensions.tensor.plans.layer_kinds import COLUMN, ROW, sharded_axes
from tfdist.extensions.tensor.plans.model_graph import ModelGraph

_POOLINGS = [f"{kind}Pooling{rank}D" for kind in ("Average", "Max") for rank in (1, 2, 3)]
_GLOBAL = tuple(getattr(keras.layers, f"Global{name}") for name in _POOLINGS)
_LOCAL = (
    *(getattr(keras.layers, name) for name in _POOLINGS),
    keras.layers.Cropping2D,
    keras.layers.UpSampling2D,
    keras.layers.ZeroPadding2D,
)


@dataclasses.dataclass(frozen=True)
class Local:
    """The mark of a sharded symbol: the axis, counted from the front, and the layers whose output it is made of."""

    axis: int
    sources: frozenset[keras.Layer]


def pair(graph: ModelGraph, roles: Mapping[keras.Layer, str]) -> tuple[set[keras.Layer], set[keras.Layer]]:
    """Returns the layers sharded by column whose output stays local, and those sharded by row whose input is local already.

    They are as many as the graph allows of those that have `roles`.
    """
    layers = {shardable.layer: shardable for shardable in graph.layers}
    columns = {layer for layer, role in roles.items() if role == COLUMN and layers[layer].keeps_local_output}
    rows = {layer for layer, role in roles.items() if role == ROW and layers[layer].is_traced}
    while True:
        flow = Flow(graph.traces, columns, rows)
        # A layer with one input local and another whole takes them all whole.
        mixed = flow.whole_inputs
        of_mixed = [sources for row, sources in flow.fed if row in mixed]
        of_others = [sources for row, sources in flow.fed if row not in mixed]
        gathered = columns.difference(*of_others).union(flow.gathered, mixed, *of_mixed)
        if not gathered & columns:
            return columns, {row for row, _ in flow.fed}
        columns -= gathered


def biases_to_gather(graph: ModelGraph, roles: Mapping[keras.Layer, str]) -> set[keras.Layer]:
    """Returns the attentions sharded by heads whose bias of the scores something needs for all heads.

    T5's first layer of a stack computes a bias and hands it to the others, which hand it on. It stays sharded by heads as long as
    all who take it are sharded so, too.
    """
    returning = {known.layer for known in graph.layers if known.kind.returns_more and known.layer in roles}
    found: set[keras.Layer] = set()
    for trace in graph.traces:
        sources: dict[keras.KerasTensor, frozenset[keras.Layer]] = {}
        for event in trace.events:
            given = frozenset().union(*(sources[x] for x in event.inputs if x in sources))
            if event.operation not in returning:
                found |= given
            elif len(event.outputs) > 1:
                sources[event.outputs[1]] = given | {event.operation}
        found |= frozenset().union(*(sources[x] for x in trace.outputs if x in sources))
    return returning if any(returning & trace.hidden.keys() for trace in graph.traces) else found


class Flow:
    """Where local outputs go in traces.

    Attributes:
        gathered: the layers whose output something needs whole.
        whole_inputs: the layers of `rows`, and the normalizations of `columns`, that get a whole input.
        fed: (row layer, the layers its local input is made of, normalizations too), one for each such call.
    """

    def __init__(self, traces: Iterable[Trace], columns: Iterable[keras.Layer], rows: Iterable[keras.Layer]) -> None:
        self.gathered: set[keras.Layer] = set()
        self.whole_inputs: set[keras.Layer] = set()
        self.fed: list[tuple[keras.Layer, frozenset[keras.Layer]]] = []
        columns, rows = set(columns), set(rows)
        for trace in traces:
            local: dict[keras.KerasTensor, Local] = {}
            for event in trace.events:
                found = [local[x] for x in event.inputs if x in local]
                if event.operation in rows:
                    self._enter(event, found)
                elif isinstance(event.operation, keras.layers.BatchNormalization) and event.operation in columns:
                    self._normalize(event, local)
                    continue
                elif found and not (joined := _through(event, found)):
                    self._gather(found)
                elif found:
                    local.update(dict.fromkeys(event.outputs, joined))
                if event.operation in columns:
                    axis = sharded_axes(event.operation, COLUMN).outputs
                    (output,) = event.outputs
                    local[output] = Local(axis % len(output.shape), frozenset({event.operation}))
            self._gather(local[x] for x in trace.outputs if x in local)

    def _enter(self, event: Event, found: list[Local]) -> None:
        row = event.operation
        axis = sharded_axes(row, ROW).inputs % len(event.inputs[0].shape)
        if len(event.inputs) == len(found) and all(part.axis == axis for part in found):
            self.fed.append((row, found[0].sources))
        else:
            self.whole_inputs.add(row)
            self._gather(found)

    def _normalize(self, event: Event, local: dict[keras.KerasTensor, Local]) -> None:
        """Channels that a normalization gets sharded it leaves sharded, if it is sharded with them."""
        layer, (inputs,), (outputs,) = event.operation, event.inputs, event.outputs
        part = local.get(inputs)
        if part is not None and part.axis == layer.axis % len(inputs.shape):
            local[outputs] = Local(part.axis, part.sources | {layer})
        else:
            self.whole_inputs.add(layer)
            self._gather([] if part is None else [part])

    def _gather(self, found: Iterable[Local]) -> None:
        for part in found:
            self.gathered |= part.sources


def _through(event: Event, found: list[Local]) -> Local | None:
    """Returns what an elementwise step makes of inputs that are all local in the same way, and a pooling of local channels; None
    for every other step."""
    operation = event.operation
    if type(operation) in _GLOBAL + _LOCAL and len(event.inputs) == len(event.outputs) == 1:
        (before,), (after,) = event.inputs, event.outputs
        channels = 1 if operation.data_format == "channels_first" else -1
        if found[0].axis != channels % len(before.shape):
            return None
        is_flat = type(operation) in _GLOBAL and not operation.keepdims
        return Local((-1 if is_flat else channels) % len(after.shape), found[0].sources)
    alike = len({part.axis for part in found}) == 1 and len({x.shape for x in (*event.inputs, *event.outputs)}) == 1
    if not (event.is_elementwise and alike and len(found) == len(event.inputs)):
        return None
    return Local(found[0].axis, frozenset().union(*(part.sources for part in found)))
