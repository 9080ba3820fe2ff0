"""What a program does with a gradient between the tape and the optimizer, read from the graph of the traced step.

Two kinds of operations are told from all others:

    elementwise   g / 4, tf.clip_by_value(g, ...), g1 + g2 of one parameter     as good on a flat shard of the sum as on the whole
    linear        the same without clip_by_value, and g - tf.reduce_mean(g),    as good on a rank's summand as on the sum
                  masks, reshaped gradients
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.graphs import tape
from tfdist.graphs.walks import inputs_first
from tfdist.placements import table

_UNCHANGED = ("Cast", "Identity")
_WRITES = frozenset("AssignAddVariableOp AssignSubVariableOp AssignVariableOp".split())


def passed_on(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the tensor that `tensor` is, passed on with others (by a `tf.custom_gradient`, say); None: it is computed."""
    return tensor.op.inputs[tensor.value_index] if tensor.op.type == "IdentityN" else None


def is_elementwise(operation: tf.Operation) -> bool:
    """Whether each element of what `operation` returns depends on the same element of its inputs, and on scalars."""
    return table.is_elementwise(operation.type)


def may_be_linear(operation: tf.Operation) -> bool:
    """Whether `operation` is of a kind that may be linear in gradients."""
    return table.linear_inputs(operation.type) is not None


def is_linear(operation: tf.Operation, is_gradient: Callable[[tf.Tensor], bool]) -> bool:
    """Whether what `operation` returns is a linear function of the gradients among its inputs, with nothing added."""
    linear = table.linear_inputs(operation.type)
    return linear is not None and linear.holds([is_gradient(tensor) for tensor in operation.inputs])


def written(operation: tf.Operation, gradient: tf.Tensor) -> list[tf.Tensor] | None:
    """Returns what `operation` writes `gradient`, or something linear in it, to, if it does no more: handles of variables.

    Also in branches, of which it returns all that they are given. To add the gradient to what a variable has, which is then
    written, is that: Keras adds to its variables so. None: it does something else.
    """
    if operation.type in _WRITES:
        return [operation.inputs[0]]
    if (handle := _added_to(operation, gradient)) is not None:
        return [handle]
    if operation.type not in ("If", "StatelessIf"):
        return None
    places = [place for place, source in enumerate(operation.inputs[1:]) if source.name == gradient.name]
    for branch in tape.branches(operation):
        waiting = [branch.inputs[place] for place in places]
        names = {tensor.name for tensor in waiting}
        is_gradient = functools.partial(_is_named, names)
        while waiting:
            for reader in waiting.pop().consumers():
                if reader.type in _WRITES:
                    continue
                if not is_linear(reader, is_gradient):
                    return None
                waiting.extend(reader.outputs)
                names.update(output.name for output in reader.outputs)
        if any(output.name in names for output in branch.outputs):
            return None
    return list(operation.inputs)


def _added_to(operation: tf.Operation, gradient: tf.Tensor) -> tf.Tensor | None:
    """Returns the handle of the variable whose new value `operation` makes of its old one and `gradient`, for nothing else."""
    if operation.type not in ("Add", "AddV2", "BiasAdd", "Sub"):
        return None
    first, second = operation.inputs
    if not tape.same(second, gradient):
        first, second = second, first
    is_turned = second is not operation.inputs[1]
    if not tape.same(second, gradient) or (is_turned and operation.type in ("BiasAdd", "Sub")):
        return None
    read = _passed_on_from(first)
    if read.type != "ReadVariableOp":
        return None
    waiting, writers = [operation.outputs[0]], []
    while waiting:
        for reader in waiting.pop().consumers():
            if reader.type in _UNCHANGED:
                waiting.extend(reader.outputs)
            else:
                writers.append(reader)
    handle = read.inputs[0]
    is_written = bool(writers) and all(one.type == "AssignVariableOp" and tape.same(one.inputs[0], handle) for one in writers)
    return handle if is_written else None


def _passed_on_from(tensor: tf.Tensor) -> tf.Operation:
    while tensor.op.type in _UNCHANGED:
        tensor = tensor.op.inputs[0]
    return tensor.op


def _is_named(names: set[str], tensor: tf.Tensor) -> bool:
    return tensor.name in names


def scalar_of(tensor: tf.Tensor) -> Any:
    """Returns what `tensor` is of every element: itself where it is a scalar, or a constant's one value; None: nothing such."""
    if tensor.shape.rank == 0:
        return tensor
    if tensor.op.type == "Fill":
        return tensor.op.inputs[1]
    if tensor.op.type == "Const":
        value = tf.get_static_value(tensor)
        if value.size and np.all(value == value.flat[0]):
            return tf.constant(value.flat[0], tensor.dtype)
    return None


def is_zero(tensor: tf.Tensor) -> bool:
    """Whether all elements of `tensor` are known to be zero."""
    value = tf.get_static_value(tensor)
    return value is not None and not np.any(value)


class Sources:
    """Of which tensors of a given kind others are computed, also across the graphs of branches and functions.

    Args:
        is_source: whether a tensor is of that kind. What it is computed from itself is not looked for.
    """

    def __init__(self, is_source: Callable[[tf.Tensor], bool]):
        self._is_source = is_source
        self._found: dict[tuple[int, str], frozenset[Any]] = {}
        self._captured: dict[int, dict[str, tf.Tensor]] = {}

    def of(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Returns the sources that `tensor` is computed from, in any order; itself, if it is one."""
        for current in inputs_first(tensor, self._inputs, self._found, self._key):
            if self._is_source(current):
                found = frozenset([current.ref()])
            else:  # one that is not known yet is computed of this one: a circle
                found = frozenset().union(*(self._found.get(self._key(x), ()) for x in self._inputs(current)))
            self._found[self._key(current)] = found
        return [reference.deref() for reference in self._found[self._key(tensor)]]

    @staticmethod
    def _key(tensor: tf.Tensor) -> tuple[int, str]:
        return id(tensor.graph), tensor.name

    def _inputs(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        graph = tensor.graph
        if self._is_source(tensor):
            return []
        if tensor.op.type == "Placeholder" and hasattr(graph, "captures"):
            if tensor.name not in self._captured.setdefault(id(graph), {}):
                self._captured[id(graph)] = {inner.name: outer for outer, inner in graph.captures}
            outer = self._captured[id(graph)].get(tensor.name)
            return [outer] if outer is not None and tf.is_symbolic_tensor(outer) and outer.dtype != tf.resource else []
        if (source := passed_on(tensor)) is not None:
            return [source]
        return [source for source in tensor.op.inputs if source.dtype != tf.resource]
