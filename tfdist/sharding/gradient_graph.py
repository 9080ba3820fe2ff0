"""The way of a gradient between the tape and the optimizer, read from the graph of the traced step.

Two kinds of operations are distinguished from all others:

    elementwise   g / 4, tf.clip_by_value(g, ...), g1 + g2 of one parameter     as good on a flat shard of the sum as on the whole
    linear        the same without clip_by_value, and g - tf.reduce_mean(g),    as good on a rank's summand as on the sum
                  masks, reshaped gradients
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives import RankProgram
from tfdist.graphs import tape
from tfdist.graphs.walks import inputs_first
from tfdist.placements import graph_facts, table
from tfdist.placements.facts import Facts
from tfdist.placements.kinds import Shard


def passed_on(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the tensor that `tensor` is, passed on with others (by a `tf.custom_gradient`, say); None: it is computed."""
    return tensor.op.inputs[tensor.value_index] if tensor.op.type == "IdentityN" else None


def _key(tensor: tf.Tensor) -> tuple[int, str]:
    return id(tensor.graph), tensor.name


class Derived:
    """The tensors of one graph that are linear in some of its tensors, with nothing added, and their images of others.

    Subclasses say the same of another kind of operations.

    Args:
        leaf: returns in which of them a tensor is known to be linear, itself or others, a set; None: it is none of them.
        is_of_tapes: whether what a tape has computed of them is looked at, too.
        program: the rank's, whose rows are no factor: of what they meet ranks' results do not add up. None: all factors are.
    """

    def __init__(self, leaf: Callable[[tf.Tensor], Any], *, is_of_tapes: bool = False, program: RankProgram | None = None):
        self._leaf, self._program = leaf, program
        self._is_of_tapes = is_of_tapes
        self._found: dict[tuple[int, str], Any] = {}
        self._num_reconnected: dict[int, int] = {}  # operations that read something else since, by id of their graph

    def of(self, tensor: tf.Tensor) -> Any:
        """Returns those that `tensor` is linear in; None: it is not."""
        reconnected, graph = tape.reconnected(tensor.graph), id(tensor.graph)
        for output in (x for op in reconnected[self._num_reconnected.get(graph, 0) :] for x in op.outputs):
            self.forget(output)
        self._num_reconnected[graph] = len(reconnected)
        for current in inputs_first(tensor, self._inputs, self._found, _key):
            known = self._leaf(current)
            if known is None and (inputs := self._inputs(current)):
                # One that is not known yet is computed of this one: a circle.
                found = [self._found.get(_key(x)) for x in inputs]
                known = found[0] if passed_on(current) is not None else self.of_result(current.op, found)
            self._found[_key(current)] = known
        return self._found[_key(tensor)]

    def forget(self, tensor: tf.Tensor) -> None:
        """Forgets what was found of `tensor`, which is one of them from now on, and of what is computed of it."""
        waiting = [tensor]
        for x in waiting:
            self._found.pop(_key(x), None)
            waiting.extend(output for op in x.consumers() for output in op.outputs if _key(output) in self._found)

    def image(self, tensor: tf.Tensor, images: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns what `tensor` is of other tensors, the `images` of those that it is computed of, by name.

        What is made on the way is added to `images`.
        """
        for current in inputs_first(tensor, lambda x: [y for y in self._inputs(x) if self.of(y)], images):
            if (source := passed_on(current)) is not None:
                images[current.name] = images[source.name]
                continue
            inputs = [images[x.name] if x.name in images else self._beside(x) for x in current.op.inputs]
            made = tape.with_inputs(current.op, inputs)
            for output, image in zip(current.op.outputs, made.outputs, strict=True):
                images[output.name] = self._finished(image, output)
        return images[tensor.name]

    def of_result(self, operation: tf.Operation, found: Sequence[Any]) -> Any:
        """Returns what follows for the results of `operation` from what was `found` of its inputs; None: nothing."""
        linear = table.row_of(operation.type).linear
        holds = linear is not None and linear.holds([x is not None for x in found])
        holds = holds and not any(x is None and self._has_rows(y) for x, y in zip(found, operation.inputs, strict=True))
        return frozenset().union(*(x or () for x in found)) if holds else None

    def _has_rows(self, tensor: tf.Tensor) -> bool:
        program = self._program if self._program is not None and tensor.graph is self._program.graph else None
        return program is not None and isinstance(program.part(Facts).of(tensor), Shard)

    def _is_of_kind(self, tensor: tf.Tensor) -> bool:
        if tensor.dtype.is_integer or tensor.dtype.is_bool or table.row_of(tensor.op.type).linear is None:
            return False
        return self._is_of_tapes or not tape.is_backward(tensor.op)

    def _finished(self, image: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
        """Returns the image of `output` from what the operation, made again, returns."""
        image.set_shape(output.shape)
        return image

    def _beside(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what an image is computed of in the place of `tensor`, which has none."""
        return tensor

    def _inputs(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        if self._leaf(tensor) is not None:
            return []
        if (source := passed_on(tensor)) is not None:
            return [source]
        return list(tensor.op.inputs) if self._is_of_kind(tensor) else []


def written(operation: tf.Operation, gradient: tf.Tensor) -> list[tf.Tensor] | None:
    """Returns what `operation` writes `gradient`, or something linear in it, to, if it does no more: handles of variables.

    Also in branches, of which it returns all that they are given. To add the gradient to what a variable has, which is then
    written, is that: Keras adds to its variables so. None: it does something else.
    """
    if tape.writes(operation):
        return [operation.inputs[0]]
    if (handle := _added_to(operation, gradient)) is not None:
        return [handle]
    if operation.type not in ("If", "StatelessIf"):
        return None
    places = [place for place, source in enumerate(operation.inputs[1:]) if tape.same(source, gradient)]
    return list(operation.inputs) if all(_only_writes(branch, places) for branch in tape.branches(operation)) else None


def _only_writes(branch: tf.Graph, places: Sequence[int]) -> bool:
    """Whether a branch writes what is linear in its inputs at `places`, and does nothing else with it."""
    names = {branch.inputs[place].name for place in places}
    linear = Derived(lambda x: frozenset([x.name]) if x.name in names else None)
    readers = [op for op in branch.get_operations() if any(linear.of(x) is not None for x in op.inputs)]
    return all(tape.writes(op) or op.outputs and all(linear.of(x) is not None for x in op.outputs) for op in readers) and all(
        linear.of(x) is None for x in branch.outputs
    )


def _added_to(operation: tf.Operation, gradient: tf.Tensor) -> tf.Tensor | None:
    """Returns the handle of the variable whose new value `operation` makes of its old one and `gradient`, for nothing else."""
    others = [x for x in operation.inputs if not tape.same(x, gradient)]
    if operation.type not in ("Add", "AddV2", "BiasAdd", "Sub") or len(others) != 1:
        return None
    read = _origin(others[0]).op
    if read.type != "ReadVariableOp":
        return None
    waiting, writers = [operation.outputs[0]], []
    for x in waiting:
        for reader in x.consumers():
            if len(table.moved_inputs(reader.type, len(reader.inputs))) == 1:
                waiting.extend(reader.outputs)
            else:
                writers.append(reader)
    handle = read.inputs[0]
    is_written = bool(writers) and all(one.type == "AssignVariableOp" and tape.same(one.inputs[0], handle) for one in writers)
    return handle if is_written else None


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor of which `tensor` is the same numbers, moved or cast."""
    while len(moved := table.moved_inputs(tensor.op.type, len(tensor.op.inputs))) == 1:
        tensor = tensor.op.inputs[moved[0]]
    return tensor


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
    """Whether `tensor` is of floats, and all its elements are known to be zero."""
    return tensor.dtype.is_floating and graph_facts.is_zero(_origin(tensor))


class Sources(Derived):
    """Of which tensors of a given kind others are computed, whatever by, also across the graphs of branches and functions: names.

    Args:
        is_source: whether a tensor is of that kind. Its own sources are not looked for.
    """

    def __init__(self, is_source: Callable[[tf.Tensor], bool]):
        super().__init__(lambda x: frozenset([x.name]) if is_source(x) else None)
        self._captured: dict[int, dict[str, tf.Tensor]] = {}

    def of_result(self, operation: tf.Operation, found: Sequence[frozenset[Any] | None]) -> frozenset[Any]:
        return frozenset().union(*(x or () for x in found))

    def _inputs(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        graph = tensor.graph
        if self._leaf(tensor) is not None:
            return []
        if tensor.op.type == "Placeholder" and hasattr(graph, "captures"):
            if tensor.name not in self._captured.setdefault(id(graph), {}):
                self._captured[id(graph)] = {inner.name: outer for outer, inner in graph.captures}
            outer = self._captured[id(graph)].get(tensor.name)
            return [outer] if outer is not None and tf.is_symbolic_tensor(outer) and outer.dtype != tf.resource else []
        if (source := passed_on(tensor)) is not None:
            return [source]
        return [source for source in tensor.op.inputs if source.dtype != tf.resource]
