"""Ways through the graph of a traced function: back, from a tensor to what it is computed of, and on."""

import pathlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# Files of TensorFlow, Keras and this package, wherever they lie: a user's may lie below a folder of such a name, too.
_LIBRARIES = ("/tensorflow/python/", "/keras/src/", f"{pathlib.Path(__file__).parents[1]}/", "<frozen", "<string>")
_TAPES = "tensorflow/python/eager/backprop.py"


def inputs_first(
    tensor: tf.Tensor,
    inputs_of: Callable[[tf.Tensor], Sequence[tf.Tensor]],
    known: Container[Any],
    key: Callable[[tf.Tensor], Any] = lambda tensor: tensor.name,
) -> Iterator[tf.Tensor]:
    """Yields `tensor` and what it is computed of, each after its inputs, without recursion: graphs are deep.

    Args:
        inputs_of: the tensors to yield before a tensor; asked once of each.
        known: the keys of tensors that are not yielded; the caller adds that of each which is.
        key: of a tensor; its name tells those of one graph apart.
    """
    waiting, begun = [(key(tensor), tensor)], set()
    while waiting:
        place, current = waiting[-1]
        if place not in known and place not in begun:
            begun.add(place)
            waiting.extend((at, x) for x in inputs_of(current) if (at := key(x)) not in known and at not in begun)
            continue
        waiting.pop()
        if place not in known:
            yield current


def reached(begin: Iterable[Any], next_of: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Yields `begin`, tensors or operations of a graph, and what comes next of each, the nearest first, each once."""
    found = {x.name: x for x in begin}
    waiting = list(found.values())
    for x in waiting:
        yield x
        new = {y.name: y for y in next_of(x) if y.name not in found}
        found.update(new)
        waiting.extend(new.values())


def before(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """Yields `tensor` and what it is computed of, the nearest first."""
    return reached([tensor], lambda x: x.op.inputs)


def graphs_here() -> Iterator[tf.Graph]:
    """Yields the graph that is being traced, and those around it."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def line_of_user(graph: tf.Graph, what: str) -> str:
    """Returns " (file, line)" of the code that made the operation whose quoted name ends `what`; "" where that is not known."""
    parts = what.split("'")
    try:
        operation = graph.get_operation_by_name(parts[1])
    except (IndexError, KeyError, ValueError):
        return ""
    return line_of(operation)


def line_of(operation: tf.Operation) -> str:
    """Returns " (file, line)" of the user's code that made `operation`; "" where that is not known."""
    frames = [frame for frame in operation.traceback or () if not any(one in frame.filename for one in _LIBRARIES)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def is_of_users(operation: tf.Operation) -> bool:
    """Whether the user's code, not Keras's or tfdist's, has called TensorFlow for `operation`."""
    files = [frame.filename for frame in operation.traceback or ()]
    of_tapes = [place for place, file in enumerate(files) if file.endswith(_TAPES)]  # what has called one is not what it calls
    callers = [file for file in files[of_tapes[-1] if of_tapes else 0 :] if _LIBRARIES[0] not in file]
    return not (callers or of_tapes) or bool(callers) and not any(one in callers[-1] for one in _LIBRARIES)
