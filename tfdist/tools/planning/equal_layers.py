"""The layers of a model in the order of their calls, and those among them that are alike, of which four are traced.

A decoder of eighty blocks is one block eighty times. The first two and the last two are traced, and those in between hand
their input on. They stand between others as the second does: what they would have held, and the gradients that they would have
made, `step_profile` adds where they stand.
"""

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import temporary
from tfdist.graphs import tape
from tfdist.sharding import layers_within
from tfdist.tools.planning.operations import tensor_bytes

FEWEST_ALIKE = 5


@dataclasses.dataclass(eq=False)
class LayerCall:
    """One call of a layer in a trace.

    Attributes:
        layer: the layer; None: what stands before the first.
        start: how many operations the graph had when it began.
        stop: how many when it ended.
        stands_for: of one that handed its input on, the call that was traced instead; None: it was traced.
        passed: the name of the operation that stands in its place; "" if it was traced.
        output: bytes of the tensors that it returned.
        within: the calls of layers with weights within it: each layer, and where its call starts and stops.
        backward: the name of the operation that stands in the place of its gradient; "" where there is none.
    """

    layer: keras.Layer | None
    start: int
    stop: int = 0
    stands_for: "LayerCall | None" = None
    output: int = 0
    passed: str = ""
    backward: str = ""
    within: list[tuple[keras.Layer, int, int]] = dataclasses.field(default_factory=list)


def units_of(model: keras.Layer) -> list[keras.Layer]:
    """Returns the layers that a model calls: its own, those of models within it in their place, each once."""
    found: dict[int, keras.Layer] = {}
    for layer in model.layers if isinstance(model, keras.Model) else ():
        for unit in units_of(layer) if isinstance(layer, keras.Model) and layer.layers else (layer,):
            found.setdefault(id(unit), unit)
    return list(found.values())


def equal_layers(layers: Sequence[keras.Layer], fewest: int | None = None) -> list[list[keras.Layer]]:
    """Returns the groups of at least `fewest` layers (None: `FEWEST_ALIKE`) alike that hold layers of their own."""
    groups: dict[str, list[keras.Layer]] = {}
    for layer in layers:
        if len(layers_within(layer)) > 1:
            groups.setdefault(_likeness(layer), []).append(layer)
    return [group for group in groups.values() if len(group) >= (fewest or FEWEST_ALIKE)]


@contextlib.contextmanager
def calls_noted(layers: Sequence[keras.Layer]) -> "Iterator[list[LayerCall]]":
    """A block in which the outermost calls of `layers` are noted, and those of equal layers between others left out."""
    noted = [LayerCall(None, 0)]
    alike = {id(layer): group for group in equal_layers(layers) for layer in group}
    outermost = {id(layer) for layer in layers}
    seconds: dict[int, tuple[LayerCall, Any, Any]] = {}
    running: list[keras.Layer] = []

    def called(layer: keras.Layer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if running or id(layer) not in outermost:
            start = tape.operations_so_far()
            output = original(*args, **kwargs)
            noted[-1].within.append((layer, start, tape.operations_so_far()))
            return output
        call = LayerCall(layer, tape.operations_so_far())
        noted.append(call)
        group = alike.get(id(layer), [])
        second = seconds.get(id(group[0])) if group else None
        given = _specs((args, kwargs))
        is_between = any(layer is other for other in group[2:-2])
        if second is not None and is_between and second[1] == given and second[2] == _specs(args[:1]):
            call.stands_for = second[0]
            output = _passed_on(args[0], call)
        else:
            running.append(layer)
            try:
                output = original(*args, **kwargs)
            finally:
                running.pop()
            if group and layer is group[1] and len(args) > 0:
                seconds.setdefault(id(group[0]), (call, given, _specs((output,))))
        call.stop = tape.operations_so_far()
        call.within.insert(0, (layer, call.start, call.stop))
        call.output = sum(tensor_bytes(x) or 0 for x in tf.nest.flatten(output) if tf.is_tensor(x))
        return output

    with contextlib.ExitStack() as before:
        inner = [one for layer in layers for one in layers_within(layer)[1:] if one.weights]
        for layer in {id(one): one for one in (*layers, *inner)}.values():
            before.enter_context(temporary.attributes(layer, call=functools.partial(called, layer, layer.call)))
        yield noted


def _passed_on(x: tf.Tensor, call: "LayerCall") -> tf.Tensor:
    """Returns `x` by way of an operation forward and one backward, whose names are noted."""
    with tape.stop_recording():
        passed = tf.identity(x, name="alike")
    call.passed = passed.op.name

    def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
        back = tf.identity(upstream, name="alike_gradient")
        call.backward = back.op.name
        return [back]

    tape.record_gradient("Alike", [passed], [x], gradient)
    return passed


def _specs(structure: Any) -> Any:
    """Returns what two calls must agree in: shapes and dtypes of tensors, and all that is no tensor."""
    flat = tf.nest.flatten(structure)
    return [(tuple(x.shape), x.dtype.name) if tf.is_tensor(x) and x.shape.rank is not None else repr(x) for x in flat]


def _likeness(layer: keras.Layer) -> str:
    """Returns what equal layers agree in: of each layer within, its class, weights, and how it is configured, names aside."""
    return repr([(type(inner), _shapes(inner), _settings(inner)) for inner in layers_within(layer)])


def _shapes(layer: keras.Layer) -> list[Any]:
    return [(tuple(weight.shape), weight.dtype, weight.trainable) for weight in layer.weights]


def _settings(layer: keras.Layer) -> str:
    try:
        config = layer.get_config()
    except Exception:  # whatever a layer raises that cannot say: what it has noted of its arguments
        kinds = (bool, int, float, str, tuple)
        config = {key: value for key, value in vars(layer).items() if key[0] != "_" and isinstance(value, kinds)}
    text = json.dumps({key: value for key, value in config.items() if key != "name"}, default=repr, sort_keys=True)
    return re.sub(r'"name": "[^"]*"|0x[0-9a-f]+', "", text)
