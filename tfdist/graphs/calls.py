"""Actions around each call of a function that is traced here: dropping values that it changes, taking a turn among threads.

    graph of the function          has `around_calls(drop, key)`, noted while it was traced
      └ called eagerly             drop() is a block around the call
      └ called by another graph    that one has it from now on

The names are private to TensorFlow: tests/test_private_names.py fails when they change.
"""

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import control_flow_v2_func_graphs

from tfdist.graphs.walks import graphs_here

Around = Callable[[], contextlib.AbstractContextManager[Any]]

_AROUND = "_tfdist_around_calls"  # of a graph, by key


def around_calls(around: Around, key: Hashable) -> None:
    """Has each call of the `tf.function` that is traced here stand in a block of `around()`; nothing where none is traced.

    With one `key` the first counts.
    """
    # Loops and branches are no functions that are called.
    graph: Any = next(x for x in graphs_here() if not isinstance(x, control_flow_v2_func_graphs.ControlFlowFuncGraph))
    if isinstance(graph, func_graph.FuncGraph):
        noted = getattr(graph, _AROUND, {})
        setattr(graph, _AROUND, {key: around} | noted)


def call(function: Any, original: Callable[[], Any]) -> Any:
    """Returns what `original()` does, which calls `function`, a concrete function of TensorFlow."""
    arounds: dict[Hashable, Around] | None = getattr(function.graph, _AROUND, None)
    if arounds is None:
        return original()
    if not tf.executing_eagerly():
        for key, around in arounds.items():
            around_calls(around, key)
        return original()
    with contextlib.ExitStack() as stack:
        for around in arounds.values():
            stack.enter_context(around())
        return original()
