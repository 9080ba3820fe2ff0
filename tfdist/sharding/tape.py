"""The private parts of TensorFlow's gradient tape that sharded reads need, in one place.

`tf.custom_gradient` would do, but its gradient function cannot say "this variable was not used" per variable, and it hides
which tensor the consumers see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import record

stop_recording = record.stop_recording


def record_gradient(
    name: str, outputs: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], gradient: Callable[..., Sequence[tf.Tensor]]
) -> None:
    """Tells the active tapes that `outputs` come from `inputs` and that `gradient(*upstream)` is the way back."""
    record.record_operation(name, list(outputs), list(inputs), gradient)


def tapes_watching(tensors: Sequence[tf.Tensor]) -> int:
    """Returns 0, 1 or 2 when no, one or several active tapes would record an operation on `tensors`."""
    return pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(list(tensors))


def is_backward(operation: tf.Operation) -> bool:
    """Whether a gradient tape (or `tf.gradients`) made `operation`; both name their operations so."""
    return "gradient_tape/" in operation.name or operation.name.startswith("gradients/") or "/gradients/" in operation.name


def reconnect(operation: tf.Operation, old: tf.Tensor, new: tf.Tensor) -> None:
    """Makes `operation` read `new` wherever it reads `old`."""
    for index, tensor in enumerate(operation.inputs):
        if tensor is old:
            operation._update_input(index, new)
