"""Runs a Keras model on symbols, through its custom layers, and writes down which tensor went where.

Keras records the calls of a functional model, but what happens inside a custom layer or a subclassed model it does not: there
`call` runs on TensorFlow tensors. Here the `call` of every layer that holds a layer of interest runs on symbols itself, so that
each step of it is seen. A `call` that cannot (raw TensorFlow ops, Python that depends on values) is one opaque step, and
every layer of interest called within is noted as such.

Nothing of the model changes: no nodes are recorded on its layers, no variable is assigned, no loss is added.

Private names: `Node`, which records a call on a layer. `symbolic_call` has no public equal either.
"""

import contextlib
import dataclasses
import functools
import re
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.layers import layer as keras_layer

from tfdist import temporary
from tfdist.extensions.tensor import elementwise
from tfdist.extensions.tensor.plans.model_inputs import Call
from tfdist.sharding import layers_within

Shapes = tuple[tuple[int | None, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
    """One step of a trace.

    Attributes:
        operation: the operation or layer that was called.
        inputs: the symbols it was called with; for a layer of interest, without masks.
        outputs: the symbols it returned.
        is_elementwise: it treats every element by itself.
        reads_variables: a Keras variable was among its arguments.
    """

    operation: keras.Operation
    inputs: tuple[keras.KerasTensor, ...]
    outputs: tuple[keras.KerasTensor, ...]
    is_elementwise: bool
    reads_variables: bool


@dataclasses.dataclass
class Trace:
    """A record of one call of the model.

    Attributes:
        inputs: the symbols that the model was called with.
        outputs: the symbols that it returned.
        events: the steps, in order.
        hidden: the layers of interest that opaque steps call, in order, each with the shapes of its first input and output; ()
            where these are not known.
        opaque: (layer, why) of each layer whose `call` could not be followed.
        foreign_reads: layers whose weights were read while none of their calls was running.
        needs_gradient: the symbols that a gradient flows back through: trainable weights come before them.
    """

    inputs: tuple[keras.KerasTensor, ...] = ()
    outputs: tuple[keras.KerasTensor, ...] = ()
    events: list[Event] = dataclasses.field(default_factory=list)
    hidden: dict[keras.Layer, Shapes] = dataclasses.field(default_factory=dict)
    opaque: list[tuple[keras.Layer, str]] = dataclasses.field(default_factory=list)
    foreign_reads: set[keras.Layer] = dataclasses.field(default_factory=set)
    needs_gradient: set[keras.KerasTensor] = dataclasses.field(default_factory=set)

    @property
    def batch_size(self) -> int:
        """The examples that the symbols of the inputs stand for."""
        return self.inputs[0].shape[0]


def trace(model: keras.Model, leaves: Sequence[keras.Layer], inputs: Call, *, training: bool) -> Trace:
    """Calls a built model on symbols and returns the steps; a call of `leaves`, the layers of interest, is a single one.

    Raises:
        Exception: whatever the model raises, when it cannot be called with these inputs at all.
    """
    recorder = _Recorder(model, leaves)
    result = recorder.trace
    args, kwargs = inputs
    result.inputs = _symbols((args, kwargs))
    recorder.known.update(result.inputs)
    with _patched(recorder), keras.StatelessScope():
        outputs = model(*args, training=training, **kwargs)
    result.outputs = _symbols(outputs)
    for event in result.events:
        if _passes_gradient(event, result.needs_gradient):
            result.needs_gradient.update(event.outputs)
    return result


def first_line(error: Exception) -> str:
    """Returns an exception in one short line."""
    text = re.sub(r"\x1b\[\d+m", "", str(error))  # Keras prints in bold
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("Exception encountered when calling")]
    return textwrap.shorten(": ".join([type(error).__name__, *lines[:1]]), 100, placeholder=" …")


class _Recorder:
    """The state of one trace; the patched methods of Keras call it.

    Inside a step that is not followed, tensors are TensorFlow's: `running` holds such steps, outer before inner.
    """

    def __init__(self, model: keras.Model, leaves: Sequence[keras.Layer]) -> None:
        self.trace = Trace()
        self.thread = threading.get_ident()
        self.leaves = frozenset(leaves)
        self.followed = {}  # layers whose `call` runs on symbols, with the leaves that they hold
        for layer in layers_within(model):
            held = self.leaves.intersection(layers_within(layer)) - {layer}
            if held and layer not in self.leaves:
                self.followed[layer] = held
        self.owners: dict[int, set[keras.Layer]] = {}
        for layer in leaves:
            for weight in layer.weights:
                self.owners.setdefault(id(weight), set()).add(layer)
        self.known: set[keras.KerasTensor] = set()
        self.running: list[keras.Operation] = []

    def opaque(self, operation: keras.Operation) -> contextlib.AbstractContextManager[None]:
        return temporary.attributes(self, running=[*self.running, operation])

    def layer_call(self, original: Callable[..., Any], layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        """In place of `Layer.__call__`."""
        if layer not in self.leaves:
            return original(layer, *args, **kwargs)
        if not self.running:
            # Positions and the like are computed at once, even on symbols; their way through this layer is looked for too.
            args, kwargs = keras.tree.map_structure(self._as_symbol, (args, kwargs))
        start = len(self.trace.events)
        with self.opaque(layer) if self.running else contextlib.nullcontext():
            outputs = original(layer, *args, **kwargs)
        if all(event.operation is not layer for event in self.trace.events[start:]):
            shapes = tuple(tuple(getattr(keras.tree.flatten(values)[0], "shape", ())) for values in ((args, kwargs), outputs))
            self.trace.hidden.setdefault(layer, shapes)
        return outputs

    def layer_step(self, original: Callable[..., Any], layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        """In place of `Layer.symbolic_call`."""
        if self.running:
            return original(layer, *args, **kwargs)
        if layer not in self.followed:
            return self._record(layer, functools.partial(_symbolic_call, original, layer), args, kwargs)
        start, hidden = len(self.trace.events), dict(self.trace.hidden)
        try:
            outputs = layer.call(*args, **kwargs)
            self._check(_symbols(outputs))
            return outputs
        except Exception as error:  # whatever a user's code raises when it is given symbols
            self.trace.opaque.append((layer, first_line(error)))
        # The leaves within are called again here, hidden; those that are not, by a Functional's own shape inference, are noted.
        del self.trace.events[start:]
        self.trace.hidden = hidden
        outputs = self._record(layer, functools.partial(original, layer), args, kwargs)
        self.trace.hidden |= {leaf: () for leaf in self.followed[layer] if leaf not in self.trace.hidden}
        return outputs

    def operation_step(self, original: Callable[..., Any], operation: keras.Operation, *args: Any, **kwargs: Any) -> Any:
        """In place of `Operation.symbolic_call`."""
        if self.running:
            return original(operation, *args, **kwargs)
        return self._record(operation, operation.compute_output_spec, args, kwargs)

    def read(self, variable: keras.Variable) -> None:
        """Called whenever the value of a variable is read."""
        self.trace.foreign_reads.update(self.owners.get(id(variable), set()).difference(self.running))

    def _record(self, operation: keras.Operation, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Keras hands masks on beside the tensors.
        seen = {name: value for name, value in kwargs.items() if operation not in self.leaves or not name.endswith("mask")}
        values = keras.tree.flatten((args, seen))
        inputs = tuple(dict.fromkeys(_symbols(values)))
        self._check(inputs)
        variables = [value for value in values if isinstance(value, keras.Variable)]
        for variable in variables:
            self.read(variable)
        with self.opaque(operation):
            outputs = step(*args, **kwargs)
            if operation in self.leaves and any(None in output.shape for output in _symbols(outputs)):
                # The shape that an EinsumDense was given may leave sizes open.
                outputs = keras.Operation.compute_output_spec(operation, *args, **kwargs)
        if not any(symbol.sparse for symbol in inputs):
            outputs = keras.tree.map_structure(_dense, outputs)
        others = [value for value in values if not isinstance(value, keras.KerasTensor)]
        alone = elementwise.is_elementwise(operation) and all(elementwise.is_number(value) for value in others)
        event = Event(operation, inputs, _symbols(outputs), alone, bool(variables))
        self.trace.events.append(event)
        self.known.update(event.outputs)
        return outputs

    def _check(self, symbols: Sequence[keras.KerasTensor]) -> None:
        if not self.known.issuperset(symbols):
            raise RuntimeError("a step of it leaves no trace on symbols")

    def _as_symbol(self, value: Any) -> Any:
        if isinstance(value, keras.KerasTensor) or not (keras.ops.is_tensor(value) or isinstance(value, np.ndarray)):
            return value
        symbol = keras.KerasTensor(value.shape, keras.backend.standardize_dtype(value.dtype))
        self.known.add(symbol)
        if keras.backend.is_float_dtype(symbol.dtype):  # it may come from weights
            self.trace.needs_gradient.add(symbol)
        return symbol


_PATCHING = threading.RLock()  # one trace at a time


@contextlib.contextmanager
def _patched(recorder: _Recorder) -> Iterator[None]:
    """Puts the recorder's methods in place of Keras's, for this thread."""

    def in_this_thread(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def method(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != recorder.thread:
                return original(*args, **kwargs)
            return replacement(original, *args, **kwargs)

        return method

    def reading(original: Callable[..., Any], scope: Any, variable: keras.Variable) -> Any:
        recorder.read(variable)
        return original(scope, variable)

    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (keras.Layer, "__call__", recorder.layer_call),
        (keras.Layer, "symbolic_call", recorder.layer_step),
        (keras.Operation, "symbolic_call", recorder.operation_step),
        (keras.StatelessScope, "get_current_value", reading),
        (keras_layer, "Node", lambda original, *args, **kwargs: None),
    ]
    with _PATCHING, contextlib.ExitStack() as undo:
        for owner, name, replacement in replacements:
            method = in_this_thread(getattr(owner, name), replacement)
            undo.enter_context(temporary.attributes(owner, **{name: method}))
        yield


def _passes_gradient(event: Event, needs_gradient: set[keras.KerasTensor]) -> bool:
    if isinstance(event.operation, keras.Layer) and event.operation.trainable_variables:
        return True
    is_stopped = type(event.operation).__name__ == "StopGradient"
    return not is_stopped and (event.reads_variables or not needs_gradient.isdisjoint(event.inputs))


def _symbolic_call(original: Callable[..., Any], layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(layer, *args, **kwargs)
    except TypeError:  # a `call` may take more arguments than the shape inference that its class inherits
        return keras.Operation.compute_output_spec(layer, *args, **kwargs)


def _dense(value: Any) -> Any:
    """Keras takes the product of a tensor and a number for a sparse tensor."""
    return keras.KerasTensor(value.shape, value.dtype) if isinstance(value, keras.KerasTensor) and value.sparse else value


def _symbols(structure: Any) -> tuple[keras.KerasTensor, ...]:
    return tuple(value for value in keras.tree.flatten(structure) if isinstance(value, keras.KerasTensor))
