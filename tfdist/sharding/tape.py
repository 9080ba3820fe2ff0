"""The private parts of TensorFlow's gradient tape that sharded reads need, in one place.

`tf.custom_gradient` would do, but its gradient function cannot say "this variable was not used" per variable, and it hides
which tensor the consumers see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import record
from tensorflow.python.ops import while_v2

LOOPS = ("While", "StatelessWhile")

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


def backward_scope() -> contextlib.AbstractContextManager:
    """Names operations of a gradient function of our own as a tape names those of TensorFlow's."""
    return tf.name_scope("gradient_tape")


def in_backward() -> bool:
    """Whether what is traced here is a gradient function that stands in `backward_scope`."""
    return "gradient_tape" in tf.compat.v1.get_default_graph().get_name_scope()


def same(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether both are the same tensor of one graph; an operation whose inputs changed hands out new Python objects."""
    return one is other or one.name == other.name


def loop_invariants(operation: tf.Operation, tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the outputs of a while loop that are `tensor` itself, an input which the loop's body passes on unchanged."""
    if operation.type not in LOOPS:
        return []
    body = while_v2._get_graph(operation, "body", "_body_graph")  # noqa: SLF001
    unchanged = []
    # Not strict: the gradient adds inputs and outputs to a loop, at its end, and not the same number of each.
    for passed, source, inside, result in zip(operation.outputs, operation.inputs, body.inputs, body.outputs, strict=False):
        while result.op.type == "Identity":
            result = result.op.inputs[0]
        if same(source, tensor) and same(result, inside):
            unchanged.append(passed)
    return unchanged


def clone(operation: tf.Operation, data: tf.Tensor) -> tf.Operation:
    """Makes `operation` a second time, with `data` as its first input and the other inputs as they are."""
    inputs = [data, *operation.inputs[1:]]
    attributes = {name: value for name, value in operation.node_def.attr.items() if not name.startswith("_")}
    return operation.graph._create_op_internal(  # noqa: SLF001
        operation.type,
        inputs,
        dtypes=[output.dtype for output in operation.outputs],
        attrs=attributes,
        name=f"{operation.name.rpartition('/')[2]}_again",
    )


def run_after(operation: tf.Operation, other: tf.Operation) -> None:
    """Makes `operation` wait for `other`."""
    operation._add_control_inputs([other])


def reconnect(operation: tf.Operation, old: tf.Tensor, new: tf.Tensor) -> None:
    """Makes `operation` read `new` wherever it reads `old`."""
    for index, tensor in enumerate(operation.inputs):
        if same(tensor, old):
            operation._update_input(index, new)
