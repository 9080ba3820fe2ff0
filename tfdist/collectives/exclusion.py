"""Threads of one process that run steps: the collectives of one begin when those of another are over.

A web service predicts in several threads, an actor plays while a learner trains. Two steps at once would have two collectives of
one key under way, and a weight would be put together of shards from before an update and from after it.

    step        waits for its data, then for the mutex; its first read of a variable waits for that, and the mutex is given back
                after its last operation with one
    reading     of shards, eagerly or in a function outside replicas: likewise

Note: in the graph. A lock of Python's around the call would be held while the step waits for its data: for ever, where a
generator calls the model to make them.

Note: no circle. Within a function a mutex is locked in the order of tracing, as all that uses one resource is, and what stands
after the k-th lock needs nothing of what stands after a later one.

Python code that a step calls (`tf.py_function`) cannot run another: each would wait for the other. That raises.

Over several workers their order counts, too: see `turns`.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import errors
from tfdist.graphs import tape
from tfdist.graphs.calls import around_calls
from tfdist.graphs.frames import tokens_here

_WAITS = ("IteratorGetNext", "QueueDequeue", "QueueEnqueue")  # for who may be waiting for a step
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")
_python: set[str] = set()  # TensorFlow's tokens of the Python code that steps call


@functools.cache
def _mutex() -> tf.Tensor:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.raw_ops.MutexV2(container="", shared_name="tfdist")


def let_wait(since: int, after: Sequence[tf.Tensor] = (), *, is_step: bool = False) -> None:
    """Lets what uses a variable, of all that was made in this graph since `tape.operations_so_far()` was `since`, run alone.

    It waits `after` these tensors for its turn. A step that reads only, and sends nothing, may run beside others.
    """
    made = tape.operations_since(since)
    names = {operation.name for operation in made}
    waits = [one for one in made if one.type.startswith(_WAITS)]
    users = [one for one in made if any(x.dtype == tf.resource for x in one.inputs) and not one.type.startswith(_WAITS)]
    # What a step reads from outside comes first, and data that it takes itself, of nothing that it has made.
    given = {x.op.name: x.op for one in made for x in one.inputs if x.op.name not in names and x.dtype != tf.resource}
    own = [one for one in waits if not any(x.op.name in names for x in one.inputs)]
    if is_step or users:
        around_calls(_not_by_a_step, key=_mutex)
    if users and not (is_step and all(user.type in _READS for user in users)):
        with tf.device("CPU:0"), tf.control_dependencies([*(x.op for x in after), *given.values(), *own]):
            lock = tf.raw_ops.MutexLock(mutex=_mutex())
        for user in users:
            user._add_control_inputs([lock.op])  # noqa: SLF001
        with tf.device("CPU:0"), tf.control_dependencies(users):
            tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)


@contextlib.contextmanager
def _not_by_a_step() -> Iterator[None]:
    if _python and not _python.isdisjoint(tokens_here()):
        raise errors.runtime_error(
            "Python code that a step calls (`tf.py_function`) runs another step, which waits for the end of the first.",
            fix="Call the model, `model(x)`; or run the other step before this one, and give it what that returns.",
        )
    yield


def note_python(made: Any) -> Any:
    """Notes that a step calls Python code and gets `made`, by an operation: in that code other steps are refused."""
    for x in tf.nest.flatten(made, expand_composites=True)[:1]:
        _python.add((x if isinstance(x, tf.Operation) else x.op).get_attr("token").decode())
    return made


def is_free(seconds: float) -> bool:
    """Whether the mutex can be had within so many seconds: no step holds it for longer, but one may wait for its data."""

    def take() -> None:
        tf.raw_ops.MutexLock(mutex=_mutex())

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A block whose reads of variables no step of another thread stands between, eager or traced.

    A thread of TensorFlow's own does not wait: it runs Python code that a step may wait for. Nor does `tf.vectorized_map`.
    """
    if not tf.executing_eagerly():
        since = tape.operations_so_far()
        yield
        if "loop_body" not in tf.compat.v1.get_default_graph().get_name_scope():  # `tf.vectorized_map` converts no lock
            let_wait(since)
    elif isinstance(threading.current_thread(), threading._DummyThread):  # noqa: SLF001
        yield
    else:
        lock = tf.raw_ops.MutexLock(mutex=_mutex())
        try:
            yield
        finally:
            del lock
