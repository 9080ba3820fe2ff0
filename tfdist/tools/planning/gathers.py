"""Which weights are gathered in a step of stage 3, how often, and together with which others.

The life of a sharded parameter is that of `tfdist.sharding.unshard`: gathered with its group when it is read in forward, dropped,
and gathered again if an operation of backward reads it, or one of forward that is computed again. The last group of forward is
the first of backward, and is kept. A gradient is reduced for each gather in which its weight is read: of a table that is the
output layer, too, twice. Added up before, the gradient of the output layer would be there, whole, until the end of backward.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.graphs import tape
from tfdist.sharding import keras_scope, layers_within
from tfdist.sharding.parameter_group import gathered_together
from tfdist.sharding.units import readers_of
from tfdist.tools.planning.candidate import Candidate
from tfdist.tools.planning.equal_layers import LayerCall
from tfdist.tools.planning.parts import parts_at
from tfdist.tools.planning.traced_model import TracedModel


@dataclasses.dataclass
class Gather:
    """One group of weights that is gathered in forward.

    Attributes:
        paths: the weights that are gathered.
        calls: the places of the calls that read them, in order.
        again: those of them that are gathered again for backward.
        reduced: those of them that are read, and so have a gradient from here.
        first_use: the number of the first operation of backward that reads one of them.
    """

    paths: tuple[str, ...]
    calls: list[int] = dataclasses.field(default_factory=list)
    again: set[str] = dataclasses.field(default_factory=set)
    reduced: set[str] = dataclasses.field(default_factory=set)
    first_use: float = float("inf")


@functools.lru_cache(maxsize=64)
def gathers_of(traced: TracedModel, tensor: int, recompute: bool, group_bytes: int, prefetch: int) -> list[Gather]:
    """Returns the gathers of forward, in order, with what is gathered again in backward.

    Args:
        traced: the model.
        tensor: over how many ranks its layers are sharded.
        recompute: whether its blocks are computed again.
        group_bytes: the setting of the strategy.
        prefetch: the setting of the strategy.
    """
    parts = parts_at(traced, Candidate(tensor=tensor), 0).parts
    local_bytes = {part.weight.path: part.bytes for part in parts if part.weight.is_parameter}
    layers = _layers_in_order(traced.model, local_bytes, tuple(traced.layouts.axes(tensor)) if tensor > 1 else ())
    groups: dict[str, tuple[str, ...]] = {}
    gathers: list[Gather] = []
    for place, path, backward in _reads(traced, recompute):
        if path not in local_bytes:
            continue
        found = next((one for one in reversed(gathers[-prefetch - 1 :]) if path in one.paths), None)
        if found is None:
            if path not in groups:
                start = next((start for start, (_, own) in enumerate(layers) if path in own), None)
                members = (path,) if start is None else tuple(gathered_together(layers[start:], groups, group_bytes))
                groups.update(dict.fromkeys(members, members))
            found = Gather(groups[path])
            gathers.append(found)
        found.calls.append(place)
        found.reduced.add(path)
        if backward is not None:
            found.again.add(path)
            found.first_use = min(found.first_use, backward)
    used = [one for one in gathers if one.again]
    if used and min(used, key=lambda one: one.first_use) is gathers[-1]:
        gathers[-1].again.clear()
    return gathers


def _layers_in_order(
    model: keras.Model, local_bytes: Mapping[str, int], made_anew: Sequence[str]
) -> list[tuple[Any, dict[str, int]]]:
    """Returns the layers that have parameters, in the order in which they made the first, each with the bytes of its own.

    `made_anew` are the weights that are made once more when all are made, in this order: those that tensor ranks share.
    """
    anew = {path: place for place, path in enumerate(made_anew)}
    found = []
    for layer in layers_within(model):
        numbered = [(getattr(made, "number", 0), variable.path) for made, variable, _ in keras_scope.own_variables(layer)]
        own = [((path in anew, anew.get(path, number)), path) for number, path in numbered if path in local_bytes]
        if own:
            found.append((min(own)[0], layer, {path: local_bytes[path] for _, path in own}))
    return [(layer, sizes) for _, layer, sizes in sorted(found, key=lambda one: one[0])]


def _reads(traced: TracedModel, recompute: bool) -> Iterator[tuple[int, str, float | None]]:
    """Yields the reads of weights in forward, in order; of a call that was passed over, as in the equal one that was traced.

    Each is the place of the call, the weight's path, and the number of the first operation of backward that reads what it
    returned; None: there is none.
    """
    trace, recomputed = traced.traces[0], traced.recomputed_calls if recompute else ()
    paths = {id(variable.value.handle): variable.path for variable in traced.model.variables}
    inside = {inner.name: paths[id(outer)] for outer, inner in trace.graph.captures if id(outer) in paths}
    operations = trace.graph.get_operations()
    numbers = {operation.name: number for number, operation in enumerate(operations)}
    for place, call in enumerate(trace.calls):
        source = call.stands_for or call
        pairs = zip(source.layer.variables, call.layer.variables, strict=True) if call.stands_for else ()
        renamed = {theirs.path: own.path for theirs, own in pairs}
        stop = trace.calls[trace.calls.index(source) + 1].start if source is not trace.calls[-1] else trace.forward
        again, begins = _computed_again(operations, source, numbers) if place in recomputed else (set(), math.inf)
        reading = [operation for operation in operations[source.start : stop] if operation.type == "ReadVariableOp"]
        reads = {one.outputs[0].name: (one, inside[one.inputs[0].name]) for one in reading if one.inputs[0].name in inside}
        for operation, path in reads.values():
            readers = [one.operation for one in readers_of(operation.outputs[0], 0, reads)]
            used = [numbers[one.name] for one in readers if tape.is_backward(one)]
            first: float | None = min((*used, *(begins for one in readers if one in again)), default=None)
            yield place, renamed.get(path, path), first if source is call or first is None else math.inf


def _computed_again(
    operations: Sequence[tf.Operation], call: LayerCall, numbers: Mapping[str, int]
) -> tuple[set[tf.Operation], float]:
    """Returns the operations of a call that run a second time if it is computed again, and where in backward that begins."""
    region = [one for one in operations[call.start : call.stop] if tape.can_be_made_again(one)]
    within = {one.name for one in operations[call.start : call.stop]}
    read: dict[tf.Operation, int] = {}
    for one in region:
        readers = [reader for output in one.outputs for reader in output.consumers()]
        if all(tape.is_backward(reader) or reader.name in within for reader in readers):  # else it is returned, and kept
            used = [numbers[reader.name] for reader in readers if tape.is_backward(reader)]
            read.update({one: min(used)} if used else {})
    return tape.ancestors(list(read), region, by_control=False), min(read.values(), default=math.inf)
