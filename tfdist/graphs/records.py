"""Records of a gradient tape of a traced graph, and their update when operations have been made to read other tensors.

A tape goes back along the tensors that it saw an operation read. Told again of an operation, it goes back along those that the
operation reads now, by TensorFlow's own gradient of it; what the tape had recorded of it before is no longer reached.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops

from tfdist.graphs import tape


def recording(gradient_tape: tf.GradientTape) -> contextlib.AbstractContextManager[None]:
    """A block in which `gradient_tape` records, whether its own has ended or not."""
    return gradient_tape._ensure_recording()


def has_gradient(op: tf.Operation) -> bool:
    """Whether a tape can be told of `op` again: its type has a gradient function, or none to give."""
    if not any(map(bears_gradients, op.outputs)):
        return True
    try:
        ops.get_gradient_function(op)
    except LookupError:
        return False
    return True


def is_recorded(op: tf.Operation) -> bool:
    """Whether the tapes that record now know that something they watch has gone into `op`."""
    return tape.tapes_watching(list(filter(bears_gradients, op.outputs))) > 0


def bears_gradients(x: tf.Tensor) -> bool:
    """Whether a derivative by `x`, or by the tensors of a list, has a meaning."""
    return x.dtype.is_floating or x.dtype.is_complex or x.dtype == tf.variant


def record_again(op: tf.Operation) -> None:
    """Tells the tapes that record now what `op` reads."""
    outputs, inputs = list(op.outputs), list(op.inputs)

    def gradient(*upstream: Any) -> list[Any]:
        with tape.backward_scope():
            function = ops.get_gradient_function(op)
            found = None if function is None else function(op, *upstream)
        found = list(found) if isinstance(found, list | tuple) else [found]
        return found if len(found) == len(inputs) else [None] * len(inputs)

    tape.record_gradient(op.type, outputs, inputs, gradient)


def record_function(
    outputs: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], gradient: Callable[..., Sequence[Any]], name: str
) -> None:
    """Tells the tapes that record now that `outputs` come from `inputs`, and that `gradient(*upstream)` is the way back."""

    def back(*upstream: Any) -> list[Any]:
        with tape.backward_scope():
            return list(gradient(*upstream))

    tape.record_gradient(name, list(outputs), list(inputs), back)
