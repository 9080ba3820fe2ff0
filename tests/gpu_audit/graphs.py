"""The operations of a traced graph and of all functions that it calls, each with the device that it will run on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping

import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph, op_def_registry

from tests.gpu_audit.registry import CONDITIONS

HOST = "host"
NOWHERE = ""  # no device is asked for: TensorFlow takes the first GPU if there is a kernel


@dataclasses.dataclass(frozen=True)
class Placed:
    """An operation, on "gpu:0", "gpu:1", ... (of ranks), `HOST` or `NOWHERE`; `devices`: of all operations of its graph."""

    operation: tf.Operation
    device: str
    devices: Mapping[str, str]

    def device_of(self, tensor: tf.Tensor) -> str:
        return self.devices.get(tensor.op.name, NOWHERE)

    def called(self) -> list[tf.Graph]:
        """Returns the functions that the operation calls."""
        return [_function_graph(self.operation.graph, name) for name in _functions(self.operation)]


class Walk:
    """Every operation of `graph` and of its functions; a function is looked at once for each device that it is called on.

    Args:
        graph: traced on CPUs, of which the first is the host's, the second stands for the first rank's GPU, and so on.
    """

    def __init__(self, graph: tf.Graph):
        self._graph = graph
        self._seen: set[tuple[str, str, tuple[str, ...]]] = set()

    def __iter__(self) -> Iterator[Placed]:
        return self._operations(self._graph, NOWHERE, ())

    def _operations(self, graph: tf.Graph, caller: str, arguments: tuple[str, ...]) -> Iterator[Placed]:
        devices = _devices(graph, caller, arguments)
        for operation in graph.get_operations():
            placed = Placed(operation, devices[operation.name], devices)
            yield placed
            for name in _functions(operation):
                given = tuple(placed.device_of(x) for x in operation.inputs)
                key = (name, placed.device, given[1:] if operation.type in CONDITIONS else given)
                if key not in self._seen:
                    self._seen.add(key)
                    yield from self._operations(_function_graph(graph, name), *key[1:])


def _devices(graph: tf.Graph, caller: str, arguments: tuple[str, ...]) -> dict[str, str]:
    """Returns the device of each operation by name: its own, that of a variable it touches, or its caller's."""
    given = dict(zip((x.op.name for x in getattr(graph, "inputs", ())), arguments, strict=False))
    given |= {
        inner.op.name: _place(getattr(outer, "device", "")) or given.get(inner.op.name, "") for outer, inner in _captures(graph)
    }
    devices: dict[str, str] = {}
    for operation in graph.get_operations():
        found = _place(operation.device) or given.get(operation.name, NOWHERE)
        if not found:
            handles = {devices.get(x.op.name, NOWHERE) for x in operation.inputs if x.dtype == tf.resource} - {NOWHERE}
            found = handles.pop() if len(handles) == 1 else NOWHERE
        devices[operation.name] = found or caller
    return devices


def _captures(graph: tf.Graph) -> list[tuple[tf.Tensor, tf.Tensor]]:
    return list(getattr(graph, "captures", ()))


@functools.cache
def _place(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device or "")
    if spec.device_type is None:
        return NOWHERE
    return f"gpu:{spec.device_index - 1}" if spec.device_index else HOST


@functools.cache
def _function_attributes(op_type: str) -> tuple[str, ...]:
    definition = op_def_registry.get(op_type)
    return () if definition is None else tuple(one.name for one in definition.attr if one.type in ("func", "list(func)"))


def _functions(operation: tf.Operation) -> list[str]:
    """Returns the functions that `operation` calls, but those of data sets, which run on the host whatever the devices."""
    if "Dataset" in operation.type or not _function_attributes(operation.type):
        return []
    values = [operation.node_def.attr[name] for name in _function_attributes(operation.type)]
    return [one.name for value in values for one in (value.list.func or [value.func]) if one.name]


def _function_graph(graph: tf.Graph, name: str) -> tf.Graph:
    outer: tf.Graph | None = graph
    while outer is not None:
        found = outer._functions.get(name) if hasattr(outer, "_functions") else None
        if found is not None:
            inner = getattr(found, "graph", None)
            return inner if inner is not None else function_def_to_graph.function_def_to_graph(found.cached_definition)
        outer = getattr(outer, "outer_graph", None)
    raise KeyError(f"{name} is in none of the graphs around it")
