"""Ways back through the graph of a traced function, from a tensor to what it is computed of."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Sequence
from types import FrameType
from typing import Any

import tensorflow as tf

_WATCHING = ("tfdist.placements.eager", "tfdist.graphs.", "contextlib")
_READING = ("__array__", "__bool__", "__float__", "__int__", "numpy")  # methods of eager tensors
_PRINTING = ("__format__", "__repr__", "__str__", "numpy_text")
_ROOMS = ("tensorflow", "keras", "tfdist", "threading", "contextlib")
_LIBRARIES = ("/tensorflow/", "/keras/", "/tfdist/", "<frozen", "<string>")


def _name(tensor: tf.Tensor) -> Any:
    return tensor.name


def inputs_first(
    tensor: tf.Tensor,
    inputs_of: Callable[[tf.Tensor], Sequence[tf.Tensor]],
    known: Container[Any],
    key: Callable[[tf.Tensor], Any] = _name,
) -> Iterator[tf.Tensor]:
    """Yields `tensor` and what it is computed of, each behind its inputs, without recursion: graphs are deep.

    Args:
        inputs_of: the tensors to yield before a tensor; asked once of each.
        known: the keys of tensors that are not yielded; the caller adds that of each which is.
        key: of a tensor; its name tells those of one graph apart.
    """
    waiting, begun = [tensor], set()
    while waiting:
        current = waiting[-1]
        place = key(current)
        if place not in known and place not in begun:
            begun.add(place)
            waiting.extend(x for x in inputs_of(current) if key(x) not in known and key(x) not in begun)
            continue
        waiting.pop()
        if place not in known:
            yield current


def before(
    tensor: tf.Tensor,
    is_end: Callable[[tf.Operation], bool] = lambda _: False,
    inputs_of: Callable[[tf.Tensor], Sequence[tf.Tensor]] = lambda x: x.op.inputs,
) -> Iterator[tuple[tf.Tensor, str | None]]:
    """Yields `tensor` and what it is computed of, the nearest first, but not beyond operations where `is_end`.

    With each comes the name of a tensor that is computed of it, None with `tensor` itself.
    """
    waiting: list[tuple[tf.Tensor, str | None]] = [(tensor, None)]
    seen = {tensor.name}
    for x, reader in waiting:
        yield x, reader
        if is_end(x.op):
            continue
        for source in inputs_of(x):
            if source.name not in seen:
                seen.add(source.name)
                waiting.append((source, x.name))


def line_of_user(graph: tf.Graph, what: str) -> str:
    """Returns " (file, line)" of the code that made the operation whose quoted name ends `what`; "" where that is not known."""
    parts = what.split("'")
    try:
        operation = graph.get_operation_by_name(parts[1])
    except (IndexError, KeyError, ValueError):
        return ""
    frames = [frame for frame in operation.traceback or () if not any(one in frame.filename for one in _LIBRARIES)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def line_that_runs(frame: FrameType | None = None) -> tuple[str, bool]:
    """Returns " (file, line)" of the user's code that runs here, or in `frame`, "" where that is not known; and whether it, or
    Keras, has asked for the operation: no tfdist, nor a `tf.custom_gradient`, which would go back along what it was given."""
    frame = frame or sys._getframe(1)
    line, is_users = "", None
    while frame is not None:
        name, code = frame.f_globals.get("__name__") or "", frame.f_code
        room = name.partition(".")[0]
        if is_users is None and room != "tensorflow" and not name.startswith(_WATCHING):
            is_users = room != "tfdist"
        if is_users is not None and not line and room not in _ROOMS:
            line = f" ({code.co_filename}, line {frame.f_lineno})"
        if name.endswith("ops.custom_gradient") and code.co_name == "_eager_mode_decorator":
            is_users = False
        frame = frame.f_back
    return line, bool(is_users)


def reader_of_numbers() -> FrameType | None:
    """Returns the frame of what computes with the numbers of an eager tensor whose method runs here; None: it is only printed, or
    TensorFlow looks at a size, or lets an assertion fail."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in _READING:
        if frame.f_code.co_name in _PRINTING:
            return None
        frame = frame.f_back
    reader = None if frame is None else frame.f_back
    if frame is None or reader is None:
        return None
    name = reader.f_globals.get("__name__") or ""
    is_of_tensorflow = name.startswith("tensorflow.") and not name.endswith("script_ops")
    is_size = is_of_tensorflow and frame.f_code.co_name in ("numpy", "__array__")
    return None if is_size or name.endswith("check_ops") else reader
