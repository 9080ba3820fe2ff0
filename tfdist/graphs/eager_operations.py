"""The operations that a thread runs eagerly: seen as they have run, and run again with other inputs.

TensorFlow hands what watches its operations the list of results that it returns to the caller after that; and it has told its
tapes before. So a result that is put in the list is the caller's, and what tapes have recorded of the first one is not reached.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import op_callbacks, op_def_registry


@contextlib.contextmanager
def each_operation_seen_by(see: Callable[[str, Sequence[Any], Sequence[Any], list[Any], bool], None]) -> Iterator[None]:
    """A block in which `see(type, inputs, attributes, outputs, may_replace)` is called after each operation that this thread runs
    eagerly.

    Attributes are names and values in turns. What `see` puts in the list `outputs` is what the caller gets; not if it may not
    replace any: then TensorFlow has run the operation in its slower way, and tells tapes after that.
    """

    def called(kind: Any, inputs: Any, attributes: Any, outputs: Any, op_name: Any = None, graph: Any = None) -> None:
        del op_name
        if graph is None:
            see(tf.compat.as_str(kind), inputs, attributes, outputs, isinstance(kind, str))

    local = context.context()._thread_local_data  # noqa: SLF001
    before, local.op_callbacks = local.op_callbacks, list(local.op_callbacks)  # which threads of replicas share
    op_callbacks.add_op_callback(called)
    try:
        yield
    finally:
        # Not `op_callbacks.remove_op_callback`, with which no thread would be called any more for what runs in the slower way.
        local.op_callbacks = before


def run_again(kind: str, inputs: Sequence[tf.Tensor], attributes: Sequence[Any], count: int) -> list[tf.Tensor]:
    """Runs an operation with other `inputs`, for tapes, too; returns its `count` results."""
    pairs = dict(zip(attributes[::2], attributes[1::2], strict=True))
    given = tuple(part for pair in pairs.items() for part in pair)
    outputs: list[tf.Tensor] = execute.quick_execute(kind, count, list(inputs), given, context.context())
    execute.record_gradient(kind, list(inputs), given, outputs)
    return outputs


@functools.cache
def is_pure(kind: str) -> bool:
    """Whether operations of a type are no more than functions of their inputs; what is no type, but a function, is not."""
    found = op_def_registry.get(kind)
    if found is None or found.is_stateful:
        return False
    return not any(attribute.type in ("func", "list(func)") for attribute in found.attr)


@functools.cache
def default_of(kind: str, name: str) -> Any:
    """Returns what the attribute `name` of operations of a type is where nobody says it. Raises ValueError if there is none."""
    found = op_def_registry.get(kind)
    for attribute in () if found is None else found.attr:
        if attribute.name == name and attribute.HasField("default_value"):
            value = attribute.default_value
            given = getattr(value, value.WhichOneof("value"))
            return list(given.i) if value.HasField("list") else given
    raise ValueError(f"{kind} has no attribute {name}")
