"""Ranks of one process that would wait for each other for ever in a graph that has been traced to its end.

`CollectivePlan` looks at the collectives of each rank. TensorFlow adds to their order: what writes a variable waits for what has
used it before, in the order of tracing, one rank after the other.

    rank 0    reads v ─ all-reduce A of what it read ─ writes v ──┐
    rank 1                             ┊                          └─ reads v ─ all-reduce A of what it read ─ writes v

All members' calls of one collective end together. So they are one node here, and the graph has a circle if and only if its ranks
wait for ever.
"""

import collections
import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.graphs import tape
from tfdist.graphs.calls import around_calls
from tfdist.graphs.walks import line_of

_HELD_UP = ("EagerPyFunc", "PyFunc", "Queue", "Barrier")
_checked: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


def check_at_call(graph: tf.Graph) -> None:
    """Has `check(graph)` called when the function that is traced here is called first: it has been traced to its end then."""
    here = weakref.ref(graph)  # which has this

    @contextlib.contextmanager
    def checked() -> Iterator[None]:
        if (traced := here()) is not None and traced not in _checked:
            check(traced)
            _checked.add(traced)
        yield

    around_calls(checked, key=here)


def check(graph: tf.Graph) -> None:
    """Raises RuntimeError where the ranks that were traced in `graph` would wait for each other for ever."""
    operations = graph.get_operations()
    nodes = _nodes(operations)
    if not nodes:
        return
    before = {one: [*{x.op for x in one.inputs}, *one.control_inputs] for one in operations}
    waiting: collections.Counter[Any] = collections.Counter()
    readers: dict[Any, list[Any]] = collections.defaultdict(list)
    for operation, needed in before.items():
        for one in needed:
            waiting[nodes.get(operation, operation)] += 1
            readers[nodes.get(one, one)].append(nodes.get(operation, operation))
    all_nodes = dict.fromkeys(nodes.get(operation, operation) for operation in operations)
    ready = [node for node in all_nodes if not waiting[node]]
    for node in ready:
        del all_nodes[node]
        for after in readers[node]:
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    if all_nodes:
        raise _error([operation for operation in operations if nodes.get(operation, operation) in all_nodes], nodes, before)


def what_waits(graph: tf.Graph) -> str:
    """Returns, in words, the operations of `graph` that code outside may hold up, and which collective waits for each."""
    operations, said = graph.get_operations(), ""
    nodes = _nodes(operations)
    for blocker in (one for one in operations if one.type.startswith(_HELD_UP)):
        after = {blocker}
        for one in operations:
            if not after.isdisjoint([*(x.op for x in one.inputs), *one.control_inputs]):
                after.add(one)
                if one in nodes:
                    members = ", ".join(f"{other.name}{_on(other)}" for other, node in nodes.items() if node == nodes[one])
                    said += f"; {members} wait for {_named(blocker)}"
                    break
    return said


def _nodes(operations: list[tf.Operation]) -> dict[tf.Operation, Any]:
    """Returns, for each operation in which collectives are, the node that it is one of."""
    counts: collections.Counter[Any] = collections.Counter()
    first: dict[Any, Any] = {}
    nodes: dict[tf.Operation, Any] = {}
    for operation in operations:
        found = [_next(one, counts) for one in _collectives(operation)]
        if found:
            node = next((first[one] for one in found if one in first), operation.name)
            nodes[operation] = node
            for one in found:
                first.setdefault(one, node)
    return nodes


def _collectives(operation: tf.Operation) -> Iterator[tf.Operation]:
    """Yields `operation`, if it is one, and those in its branches."""
    if operation.type.startswith("Collective") and operation.type.endswith("V2"):
        yield operation
    for branch in tape.traced_branches(operation) if operation.type in tape.BRANCHES else ():
        for inner in branch.get_operations():
            yield from _collectives(inner)


def _next(operation: tf.Operation, counts: collections.Counter[Any]) -> Any:
    """Returns what tells a collective from all others: its keys, and how many of its rank with these were there before."""
    places = {argument.name: place for place, argument in enumerate(operation.op_def.input_arg)}
    # None where the step finds the key, by the size of what is sent.
    keys = tuple(str(tf.get_static_value(operation.inputs[places[name]])) for name in ("group_key", "instance_key"))
    counts[operation.device, keys] += 1
    return keys, counts[operation.device, keys]


def _error(
    left: list[tf.Operation], nodes: dict[tf.Operation, Any], before: dict[tf.Operation, list[tf.Operation]]
) -> RuntimeError:
    """Returns the error of a circle among the operations that are `left`."""
    of_node: dict[Any, list[tf.Operation]] = collections.defaultdict(list)
    for operation in left:
        of_node[nodes.get(operation, operation)].append(operation)
    # From any of them back: each has one before it that is left, so one comes again.
    node, way = nodes.get(left[-1], left[-1]), {}
    while node not in way:
        pairs = ((one, needed) for one in of_node[node] for needed in before[one])
        way[node] = next((one, needed) for one, needed in pairs if nodes.get(needed, needed) in of_node)
        node = nodes.get(way[node][1], way[node][1])
    circle = [way[node] for node in list(way)[list(way).index(node) :]]
    said = "; ".join(f"{_named(one)} waits for {_named(needed)}" for one, needed in circle if one in nodes or _share(one, needed))
    return errors.runtime_error(
        f"Ranks would wait for each other for ever: {said}.",
        fix="What several ranks use, and some write, orders them one after the other. Make it in `strategy.scope()`, so that "
        "each rank has its own, or use it outside `strategy.run`.",
    )


def _named(operation: tf.Operation) -> str:
    return f"{operation.name}{line_of(operation)}{_on(operation)}"


def _on(operation: tf.Operation) -> str:
    return f" on {operation.device.rpartition('device:')[2] or 'the host'}"


def _share(one: tf.Operation, other: tf.Operation) -> bool:
    """Whether both use one variable, table or queue."""
    return bool({x.name for x in one.inputs if x.dtype == tf.resource} & {x.name for x in other.inputs})
